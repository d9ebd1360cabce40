"""Expected tokens of the rules, by enumeration, beside each other and beside the bound of all rules."""

from __future__ import annotations

import itertools

import pytest
import torch

from speculant.lab.exactness import EXACT, FULL_SUPPORT, Branches, EnumeratingChance, Pair, enumerate_outcomes, softmax
from speculant.types import DraftTree
from speculant.verification import iterative_speculative_sample
from tests.exactness.speculation import BRANCHING
from tests.exactness.verdicts import MakeTree, Shape, chain_of, deterministic, sampled, target_distributions
from tests.examples import examples
from tests.fakes import known_verifiers

SEEDS = examples(12, least=4)
PAIRS = [Pair(seed, vocab_size) for vocab_size in (2, 3, 4) for seed in range(SEEDS)]
Outcomes = dict[tuple[tuple[int, ...], int], float]  # (tokens, accepted) -> probability


def outcomes(name: str, pair: Pair, make_tree: MakeTree) -> Outcomes:
    """Follow every branch of drafting and verification."""

    def run(branches: Branches) -> tuple[tuple[int, ...], int]:
        chance = EnumeratingChance(branches)
        tree = make_tree(chance)
        verdict = known_verifiers()[name].verify(tree, target_distributions(pair, tree), chance)
        return (*(tree.token_list[node] for node in verdict.path), verdict.token), len(verdict.path)

    return enumerate_outcomes(run)


def accepted(name: str, pair: Pair, make_tree: MakeTree) -> float:
    return sum(count * probability for (_, count), probability in outcomes(name, pair, make_tree).items())


def assert_same(one: Outcomes, other: Outcomes) -> None:
    for outcome in {*one, *other}:
        assert one.get(outcome, 0.0) == pytest.approx(other.get(outcome, 0.0), abs=EXACT)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_traversal_of_a_chain_accepts_what_block_does(length: int) -> None:
    for pair in PAIRS[: SEEDS * (2 if length < 3 else 1)]:
        make = sampled(pair, chain_of(length))
        counts = [{}, {}]
        for of_rule, name in zip(counts, ("block", "traversal"), strict=True):
            for outcome, probability in outcomes(name, pair, make).items():
                of_rule[outcome] = of_rule.get(outcome, 0.0) + probability
        assert_same(*counts)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_block_accepts_at_least_what_rejection_does(length: int) -> None:
    gains = []
    for pair in PAIRS[:: 1 if length < 3 else 3]:
        make = sampled(pair, chain_of(length))
        gains.append(accepted("block", pair, make) - accepted("rejection", pair, make))
    assert min(gains) >= -EXACT
    if length == 1:
        assert max(gains) <= EXACT


def test_block_accepts_strictly_more_from_two_drafts_on() -> None:
    for pair in [Pair(seed, 3, FULL_SUPPORT[:1]) for seed in range(examples(10, least=2))]:
        for length in (2, 3):
            make = sampled(pair, chain_of(length))
            assert accepted("block", pair, make) > accepted("rejection", pair, make) + 1e-4


@pytest.mark.parametrize("name", ["block", "rejection", "multi_draft", "traversal"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_rule_is_match_for_a_deterministic_chain(name: str, length: int) -> None:
    """The token drawn after a rejection is the one that `match` draws at once."""
    for pair in PAIRS[: SEEDS * (2 if length < 3 else 1)]:
        make = deterministic(pair, chain_of(length))
        assert_same(outcomes(name, pair, make), outcomes("match", pair, make))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_multi_draft_with_one_child_is_rejection(length: int) -> None:
    for pair in PAIRS[: SEEDS * (2 if length < 3 else 1)]:
        make = sampled(pair, chain_of(length))
        assert_same(outcomes("multi_draft", pair, make), outcomes("rejection", pair, make))


TREES: list[Shape] = [(-1, -1), (-1, -1, -1), (-1, 0, 0), (-1, -1, 0, 1)]


@pytest.mark.parametrize("shape", [*TREES, pytest.param((-1, -1, 0, 0, 1), marks=pytest.mark.slow)])
def test_traversal_accepts_at_least_what_multi_draft_does(shape: Shape) -> None:
    gains = []
    for pair in [Pair(seed, 3, FULL_SUPPORT) for seed in range(examples(6, least=2))]:
        make = sampled(pair, shape)
        gains.append(accepted("traversal", pair, make) - accepted("multi_draft", pair, make))
    assert min(gains) >= -EXACT
    if len(set(shape)) > 1:
        assert max(gains) > 1e-4


def transport_bound(pair: Pair, children: int) -> float:
    """Return the most that siblings drawn without replacement can be accepted (max flow = min cut)."""
    p, q = (softmax(distribution(())) for distribution in (pair.target, pair.draft))
    drafts: dict[frozenset[int], float] = {}
    for drawn in itertools.permutations(range(pair.vocab_size), children):
        probability, left = 1.0, 1.0
        for token in drawn:
            probability *= q[token] / left if left > 1e-15 else 0.0
            left -= q[token]
        drafts[frozenset(drawn)] = drafts.get(frozenset(drawn), 0.0) + probability
    tokens = range(pair.vocab_size)
    cuts = [set(cut) for size in range(pair.vocab_size + 1) for cut in itertools.combinations(tokens, size)]
    return min(
        sum(p[token] for token in cut) + sum(share for draft, share in drafts.items() if not draft <= cut)
        for cut in cuts
    )


@pytest.mark.parametrize("children", [1, 2, 3])
def test_no_rule_exceeds_the_optimal_transport_bound(children: int) -> None:
    for pair in [Pair(seed, 4, FULL_SUPPORT) for seed in range(examples(12, least=2))]:
        bound = transport_bound(pair, children)
        for name in BRANCHING:
            assert accepted(name, pair, sampled(pair, (-1,) * children)) <= bound + EXACT
        if children == 1:
            assert accepted("multi_draft", pair, sampled(pair, (-1,))) == pytest.approx(bound, abs=EXACT)


@pytest.mark.parametrize("name", ["block", "rejection", "multi_draft", "traversal"])
def test_a_node_with_an_invalid_distribution_counts_as_missing(name: str) -> None:
    for seed in range(6):
        pair = Pair(seed, 3, FULL_SUPPORT)
        whole, cut = sampled(pair, chain_of(2)), sampled(pair, chain_of(1))

        def spoilt(chance: EnumeratingChance, whole: MakeTree = whole) -> DraftTree:
            tree = whole(chance)
            assert tree.probs is not None
            return DraftTree(tree.tokens, tree.parents, torch.stack([tree.probs[0], tree.probs[1] * torch.nan]))

        assert_same(outcomes(name, pair, spoilt), outcomes(name, pair, cut))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_iterative_sampling_keeps_the_distribution(count: int) -> None:
    """K proposals with replacement, each from a distribution of its own (arXiv 2305.09781)."""
    for seed in range(12):
        pairs = [Pair(100 * seed + k, 3) for k in range(count)]
        p = torch.tensor(softmax(pairs[0].target(())), dtype=torch.float64)
        q = torch.tensor([softmax(pair.draft(())) for pair in pairs], dtype=torch.float64)

        def run(branches: Branches, p: torch.Tensor = p, q: torch.Tensor = q) -> int:
            return iterative_speculative_sample(p, q, EnumeratingChance(branches))

        found = enumerate_outcomes(run)
        for token, probability in enumerate(p.tolist()):
            assert found.get(token, 0.0) == pytest.approx(probability, abs=EXACT)


def test_siblings_may_come_from_different_models() -> None:
    """Each child brings the distribution that it was drawn from."""
    for seed in range(8):
        one, two = Pair(seed, 3, FULL_SUPPORT), Pair(seed + 50, 3, FULL_SUPPORT)
        q = [torch.tensor(softmax(pair.draft(())), dtype=torch.float64) for pair in (one, two)]

        def make(chance: EnumeratingChance, q: list[torch.Tensor] = q) -> DraftTree:
            first = chance.draw(q[0])
            rest = q[1].clone()
            rest[first] = 0.0
            rest = rest / rest.sum()
            tokens = torch.tensor([first, chance.draw(rest)])
            return DraftTree(tokens, torch.tensor([-1, -1]), torch.stack([q[0], rest]))

        distribution: dict[int, float] = {}
        for (tokens, _), probability in outcomes("multi_draft", one, make).items():
            distribution[tokens[0]] = distribution.get(tokens[0], 0.0) + probability
        for token, probability in enumerate(softmax(one.target(()))):
            assert distribution.get(token, 0.0) == pytest.approx(probability, abs=EXACT)
