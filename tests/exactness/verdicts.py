"""Lets a verification rule decide on drafts of random laws, following every branch, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speculant.exactness.enumeration import Branches, EnumeratingChance, enumerate_outcomes
from speculant.exactness.laws import Joint, Pair, completed, deviation, joint_law, softmax
from speculant.exactness.tables import History
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier

Shape = tuple[int, ...]  # parents of a draft's nodes
MakeTree = Callable[[EnumeratingChance], DraftTree]


def chain_of(length: int) -> Shape:
    """Return the shape of a chain."""
    return tuple(range(-1, length - 1))


def law_after_verdict(rule: Verifier, pair: Pair, make_tree: MakeTree) -> Joint:
    """Return the law of accepted tokens and the one that follows, over drafting and verification."""

    def run(branches: Branches) -> History:
        chance = EnumeratingChance(branches)
        tree = make_tree(chance)
        verdict = rule.verify(tree, target_laws(pair, tree), chance)
        assert_is_path(tree, verdict)
        return (*(tree.token_list[node] for node in verdict.path), verdict.token)

    return enumerate_outcomes(run)


def distance(rule: Verifier, pair: Pair, make_tree: MakeTree) -> float:
    """Return how far the law after a verdict, completed by the target, is from the target's own."""
    outcomes = law_after_verdict(rule, pair, make_tree)
    depth = max(len(tokens) for tokens in outcomes)

    def target(history: History) -> list[float]:
        return softmax(pair.target(history))

    ours = completed(outcomes, target, (), depth, lambda _: False)
    return deviation(ours, joint_law(target, (), depth, lambda _: False))


def target_laws(pair: Pair, tree: DraftTree) -> Tensor:
    """Return p [n + 1, V]: after the root and after each node."""
    histories = [tuple(tree.tokens_to(node)) for node in range(-1, tree.size)]
    return torch.tensor([softmax(pair.target(history)) for history in histories], dtype=torch.float64)


def assert_is_path(tree: DraftTree, verdict: Verdict) -> None:
    """Accepted nodes lead from the root downwards, each the child of the one before."""
    for above, node in zip((-1, *verdict.path), verdict.path, strict=False):
        assert tree.parent_list[node] == above, f"{verdict.path} is not a path"


def sampled(pair: Pair, shape: Shape) -> MakeTree:
    """Draw every node from the draft's law after its parent, siblings without replacement.

    Where the law has no token left, the sibling and all behind it are missing.
    """

    def make(chance: EnumeratingChance) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[Tensor] = []
        place: dict[int, int] = {-1: -1}  # in the shape -> in the tree
        for node, parent in enumerate(shape):
            if parent not in place:
                continue
            above = place[parent]
            law = _remaining(pair, tokens, parents, above)
            if law is None:
                continue
            place[node] = len(tokens)
            tokens.append(chance.draw(law))
            parents.append(above)
            laws.append(law)
        return DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents), torch.stack(laws))

    return make


def _remaining(pair: Pair, tokens: Sequence[int], parents: Sequence[int], above: int) -> Tensor | None:
    """Return the draft's law after node `above` without the tokens of its children so far."""
    history, node = [], above
    while node >= 0:
        history.append(tokens[node])
        node = parents[node]
    law = torch.tensor(softmax(pair.draft(tuple(history[::-1]))), dtype=torch.float64)
    law[[token for token, parent in zip(tokens, parents, strict=True) if parent == above]] = 0
    return law / law.sum() if float(law.sum()) > 0 else None


def deterministic(pair: Pair, shape: Shape) -> MakeTree:
    """Propose fixed tokens; siblings differ from each other."""
    tokens = [(pair.seed + parent + shape[:node].count(parent)) % pair.vocab_size for node, parent in enumerate(shape)]
    tree = DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(shape, dtype=torch.int64))
    return lambda chance: tree
