"""The best shape is the best of all shapes, and verifiers accept its expected number of nodes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from speculant.drafting.topology import StaticTree, read_tree
from speculant.lab.exactness.enumeration import Branches, EnumeratingChance, enumerate_outcomes
from speculant.lab.exactness.tables import EXACT, two_distributions
from speculant.lab.theory.trees import best_tree, expected_accepted
from speculant.types import DraftTree
from speculant.verification.base import Verifier
from speculant.verification.match import Match
from speculant.verification.multi_draft import MultiDraft
from tests.examples import sizes

Path = tuple[int, ...]
RATES = (0.55, 0.2, 0.1, 0.06, 0.04, 0.02, 0.01)


def every_shape(nodes: int) -> set[frozenset[Path]]:
    """Grow all shapes of a size node by node."""
    shapes: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes):
        shapes = {shape | {new} for shape in shapes for new in places(shape)}
    return shapes


def places(shape: frozenset[Path]) -> list[Path]:
    """Return the places for a new node: below each node, after its youngest child."""
    return [(*above, sum(path[:-1] == above for path in shape if path)) for above in (*shape, ())]


def random_rates(rng: np.random.Generator) -> list[float]:
    """Draw rates in any order, some of them 0."""
    rates = rng.dirichlet(np.ones(5))[:4]
    rates[rng.random(4) < 0.2] = 0.0
    return [float(rate) for rate in rates]


def as_paths(shape: frozenset[Path]) -> list[list[int]]:
    return [list(path) for path in shape]


def fits(shape: frozenset[Path], max_depth: int, max_children: int) -> bool:
    return all(len(path) <= max_depth and path[-1] < max_children for path in shape)


@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("max_depth", "max_children"), [(None, None), (2, None), (3, 2), (None, 1), (1, None), (4, 3)])
def test_no_shape_is_better(nodes: int, max_depth: int | None, max_children: int | None) -> None:
    shapes = [shape for shape in every_shape(nodes) if fits(shape, max_depth or nodes, min(max_children or 4, 4))]
    for seed in range(12):
        rates = random_rates(np.random.default_rng([seed, nodes]))
        if not shapes:
            with pytest.raises(ValueError, match="don't fit"):
                best_tree(rates, nodes, max_depth, max_children)
            continue
        found = best_tree(rates, nodes, max_depth, max_children)
        assert frozenset(map(tuple, found)) in shapes
        most = max(expected_accepted(as_paths(shape), rates) for shape in shapes)
        assert expected_accepted(found, rates) == pytest.approx(most, abs=EXACT)


def test_all_shapes_are_compared() -> None:
    assert [len(every_shape(nodes)) for nodes in range(1, 7)] == [1, 2, 5, 14, 42, 132], "the Catalan numbers"


def greedily(rates: Sequence[float], nodes: int) -> float:
    """Take the likeliest node each time: this is best if no younger sibling is likelier."""
    total, open_nodes = 0.0, [(-rates[0], 1.0, 0)]
    for _ in range(nodes):
        negative, above, rank = heapq.heappop(open_nodes)
        total -= negative
        heapq.heappush(open_nodes, (negative * rates[0], -negative, 0))
        if rank + 1 < len(rates):
            heapq.heappush(open_nodes, (-above * rates[rank + 1], above, rank + 1))
    return total


@pytest.mark.parametrize("nodes", [8, 64])
def test_a_large_shape_takes_the_likeliest_node_each_time(nodes: int) -> None:
    assert expected_accepted(best_tree(RATES, nodes), RATES) == pytest.approx(greedily(RATES, nodes), abs=EXACT)


def test_more_nodes_are_never_worse_and_bounds_never_better() -> None:
    gains = [expected_accepted(best_tree(RATES, nodes), RATES) for nodes in range(1, 25)]
    assert all(after >= before for before, after in itertools.pairwise(gains))
    by_depth = [expected_accepted(best_tree(RATES, 24, depth), RATES) for depth in range(3, 25)]
    assert all(after >= before for before, after in itertools.pairwise(by_depth))
    assert by_depth[-1] == gains[-1]


@pytest.mark.parametrize("rates", [[0.6], [0.6, 0.0, 0.0], [1.0, 0.0]])
def test_it_is_a_chain_when_only_the_first_is_ever_accepted(rates: list[float]) -> None:
    assert best_tree(rates, 5) == [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]
    expected = sum(rates[0] ** depth for depth in range(1, 6))
    assert expected_accepted(best_tree(rates, 5), rates) == pytest.approx(expected, abs=EXACT)


def test_a_drafter_takes_the_shape() -> None:
    found = best_tree(RATES, 12)
    shape = read_tree(found)
    assert shape is not None
    assert shape.most_nodes == 12
    assert shape.paths == frozenset(map(tuple, found))
    assert read_tree(best_tree([0.3, 0.2, 0.1], 3, max_depth=1)) == StaticTree.of_widths([3])


@pytest.mark.parametrize(
    ("rates", "nodes", "bounds", "says"),
    [
        ([], 3, {}, "not probabilities"),
        ([0.7, 0.4], 3, {}, "not probabilities"),
        ([0.7, -0.1], 3, {}, "not probabilities"),
        ([float("nan")], 3, {}, "not probabilities"),
        ([0.7], 0, {}, "nodes=0"),
        ([0.7], 3, {"max_depth": 0}, "max_depth=0"),
        ([0.7], 3, {"max_children": -1}, "max_children=-1"),
        ([0.7, 0.1], 7, {"max_depth": 2}, "7 nodes don't fit into depth 2 with 2 children"),
    ],
)
def test_impossible_sizes_are_refused(rates: list[float], nodes: int, bounds: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        best_tree(rates, nodes, **bounds)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([[]], "is no node"),
        ([[0, 0]], "parent or an elder"),
        ([[1]], "parent or an elder"),
        ([[0], [1], [2]], "rank without a rate"),
        ([[-1]], "rank without a rate"),
        ([[0], [0]], "twice"),
    ],
)
def test_invalid_shapes_are_refused(paths: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expected_accepted(paths, [0.5, 0.2])


def accepted_by(rule: Verifier, shape: StaticTree, p: torch.Tensor, q: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Follow every way to draw and verify a shape, with the same probs after every token; return accepted paths."""

    def run(branches: Branches) -> Path:
        chance, parents, ranks = EnumeratingChance(branches), list[int](), list[Path]()
        tokens: list[int] = []
        distributions: list[torch.Tensor] = []
        level: list[tuple[int, Path]] = [(-1, ())]
        for parent, above in level:
            for token, path, distribution in shape.children(above, [q], chance.draw, distinct=False):
                level.append((len(tokens), path))
                tokens.append(token)
                parents.append(parent)
                ranks.append(path)
                distributions.append(distribution)
        tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.stack(distributions))
        verdict = rule.verify(tree, p.expand(tree.size + 1, -1), chance)
        return ranks[verdict.path[-1]] if verdict.path else ()

    return enumerate_outcomes(run)


@pytest.mark.parametrize("pairs", sizes(1, 4))
@pytest.mark.parametrize(
    "rule", [MultiDraft(), pytest.param(Match(), marks=pytest.mark.slow)], ids=["multi_draft", "match"]
)
def test_a_verifier_accepts_the_expected_number(rule: Verifier, pairs: int) -> None:
    """Every context has the same distributions, so rates are the same everywhere and the number is exact."""
    for seed in range(pairs):
        p, q = (
            torch.tensor(distribution) for distribution in two_distributions("dense", 3, np.random.default_rng(seed))
        )
        at_root = accepted_by(rule, StaticTree.of_widths([2]), p, q)
        rates = [at_root.get((rank,), 0.0) for rank in range(2)]
        paths = [[0], [1], [0, 0], [0, 1], [1, 0]]
        found = accepted_by(rule, StaticTree(frozenset(map(tuple, paths))), p, q)
        mean = sum(len(path) * probability for path, probability in found.items())
        assert expected_accepted(paths, rates) == pytest.approx(mean, abs=EXACT)
