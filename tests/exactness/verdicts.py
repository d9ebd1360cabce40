"""Runs a verification rule on drafts of random distributions through every branch, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speculant.lab.exactness.enumeration import Branches, EnumeratingChance, enumerate_outcomes
from speculant.lab.exactness.tables import History, Joint, Pair, completed, deviation, joint_distribution, softmax
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier

Shape = tuple[int, ...]  # parents of a draft's nodes
MakeTree = Callable[[EnumeratingChance], DraftTree]


def chain_of(length: int) -> Shape:
    """Return the shape of a chain."""
    return tuple(range(-1, length - 1))


def distribution_after_verdict(verifier: Verifier, pair: Pair, make_tree: MakeTree) -> Joint:
    """Return the distribution of accepted tokens and the one that follows, over drafting and verification."""

    def run(branches: Branches) -> History:
        chance = EnumeratingChance(branches)
        tree = make_tree(chance)
        verdict = verifier.verify(tree, target_distributions(pair, tree), chance)
        assert_is_path(tree, verdict)
        return (*(tree.token_list[node] for node in verdict.path), verdict.token)

    return enumerate_outcomes(run)


def distance(verifier: Verifier, pair: Pair, make_tree: MakeTree) -> float:
    """Return how far the distribution after a verdict, completed by the target, is from the target's own."""
    outcomes = distribution_after_verdict(verifier, pair, make_tree)
    depth = max(len(tokens) for tokens in outcomes)

    def target(history: History) -> list[float]:
        return softmax(pair.target(history))

    ours = completed(outcomes, target, (), depth, lambda _: False)
    return deviation(ours, joint_distribution(target, (), depth, lambda _: False))


def target_distributions(pair: Pair, tree: DraftTree) -> Tensor:
    """Return p [n + 1, V]: after the root and after each node."""
    histories = [tuple(tree.tokens_to(node)) for node in range(-1, tree.size)]
    return torch.tensor([softmax(pair.target(history)) for history in histories], dtype=torch.float64)


def assert_is_path(tree: DraftTree, verdict: Verdict) -> None:
    """Accepted nodes lead from the root downwards, each the child of the one before."""
    for above, node in zip((-1, *verdict.path), verdict.path, strict=False):
        assert tree.parent_list[node] == above, f"{verdict.path} is not a path"


def sampled(pair: Pair, shape: Shape) -> MakeTree:
    """Draw every node from the draft's distribution after its parent, siblings without replacement.

    Where the distribution has no token left, the sibling and its descendants are missing.
    """

    def make(chance: EnumeratingChance) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        distributions: list[Tensor] = []
        place: dict[int, int] = {-1: -1}  # in the shape -> in the tree
        for node, parent in enumerate(shape):
            if parent not in place:
                continue
            above = place[parent]
            distribution = _remaining(pair, tokens, parents, above)
            if distribution is None:
                continue
            place[node] = len(tokens)
            tokens.append(chance.draw(distribution))
            parents.append(above)
            distributions.append(distribution)
        return DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents), torch.stack(distributions))

    return make


def _remaining(pair: Pair, tokens: Sequence[int], parents: Sequence[int], above: int) -> Tensor | None:
    """Return the draft's distribution after node `above` without the tokens of its children so far."""
    history, node = [], above
    while node >= 0:
        history.append(tokens[node])
        node = parents[node]
    distribution = torch.tensor(softmax(pair.draft(tuple(history[::-1]))), dtype=torch.float64)
    distribution[[token for token, parent in zip(tokens, parents, strict=True) if parent == above]] = 0
    return distribution / distribution.sum() if float(distribution.sum()) > 0 else None


def deterministic(pair: Pair, shape: Shape) -> MakeTree:
    """Propose fixed tokens; siblings differ from each other."""
    tokens = [(pair.seed + parent + shape[:node].count(parent)) % pair.vocab_size for node, parent in enumerate(shape)]
    tree = DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(shape, dtype=torch.int64))
    return lambda chance: tree
