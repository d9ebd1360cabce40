"""Every lossless rule keeps the target's distribution on every draft that it understands.

A new rule is found through its file (or entry point) and is held to this without another line here.
"""

from __future__ import annotations

import pytest
import torch

from speculant.lab.exactness import EXACT, NODE_KINDS, EnumeratingChance, Pair, enumerate_outcomes
from speculant.types import DraftTree, Verdict
from speculant.verification import Rejection, Verifier
from tests.exactness.speculation import BRANCHING, LOSSLESS
from tests.exactness.verdicts import Shape, chain_of, deterministic, distance, sampled
from tests.examples import examples
from tests.fakes import known_verifiers

CHAINS = {(2, 1): 30, (2, 2): 30, (2, 3): 20, (3, 1): 30, (3, 2): 30, (3, 3): 6, (4, 1): 20, (4, 2): 10}
TREES: list[Shape] = [
    (-1, -1),
    (-1, -1, -1),
    (-1, 0, 0),
    (-1, 0, 0, -1),
    (-1, -1, 1, 0, 0),
    (-1, -1, 0, 1, -1),
]


@pytest.fixture(params=LOSSLESS)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return known_verifiers()[request.param]


@pytest.fixture(params=BRANCHING)
def tree_rule(request: pytest.FixtureRequest) -> Verifier:
    return known_verifiers()[request.param]


def test_the_shipped_rules_are_found() -> None:
    assert {"match", "rejection"} <= set(LOSSLESS)
    assert "match" in BRANCHING


class Refusing(EnumeratingChance):
    """Refuses everything it may."""

    def accept(self, probability: float) -> bool:
        """See `Chance.accept`."""
        return False


@pytest.mark.parametrize("rounding", [0.0, 1e-17])
def test_an_empty_residual_falls_back_to_the_target(rounding: float) -> None:
    """p / q just below 1 by rounding alone: the refused token leaves no residual to draw from."""
    p = torch.tensor([[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]], dtype=torch.float64)
    tree = DraftTree.chain([2], p[:1] + rounding)
    distribution = enumerate_outcomes(lambda branches: Rejection().verify(tree, p, Refusing(branches)))
    assert distribution == {Verdict((), 0): 0.25, Verdict((), 2): 0.75}


@pytest.mark.parametrize(("vocab_size", "length"), CHAINS)
def test_sampled_chains(verifier: Verifier, vocab_size: int, length: int) -> None:
    for seed in range(examples(CHAINS[vocab_size, length])):
        pair = Pair(seed, vocab_size)
        assert distance(verifier, pair, sampled(pair, chain_of(length))) <= EXACT, pair


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_sampled_chains_of_one_kind(verifier: Verifier, kind: str) -> None:
    for seed in range(6):
        pair = Pair(seed, 3, (kind,))
        assert distance(verifier, pair, sampled(pair, chain_of(2))) <= EXACT, pair


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_deterministic_chains(verifier: Verifier, length: int) -> None:
    for seed in range(20):
        pair = Pair(seed, 2 + seed % 3)
        assert distance(verifier, pair, deterministic(pair, chain_of(length))) <= EXACT, pair


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_sampled_trees(tree_rule: Verifier, shape: Shape) -> None:
    for seed in range(examples(20, least=1)):
        pair = Pair(seed, 3)
        assert distance(tree_rule, pair, sampled(pair, shape)) <= EXACT, pair


@pytest.mark.parametrize("shape", [*TREES, (-1, -1, -1, 0, 1, 1, 1, 0, 2, 2)], ids=str)
def test_deterministic_trees(tree_rule: Verifier, shape: Shape) -> None:
    for seed in range(examples(12)):
        pair = Pair(seed, 3 + seed % 2)
        assert distance(tree_rule, pair, deterministic(pair, shape)) <= EXACT, pair


@pytest.mark.parametrize("kind", ["zeros", "disjoint", "one-hot", "both one-hot"])
def test_trees_of_one_kind(tree_rule: Verifier, kind: str) -> None:
    for seed in range(4):
        pair = Pair(seed, 3, (kind,))
        assert distance(tree_rule, pair, sampled(pair, (-1, -1, 0, 1))) <= EXACT, pair
