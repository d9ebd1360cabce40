"""The joint choice of a batch's lengths, against every choice there is."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from speculant.lengths import Offers, choose_jointly, choose_scored

DEPTH = 3


def survivals_of(rng: np.random.Generator, sequences: int) -> list[list[float]]:
    return [list(accumulate(rng.uniform(0.1, 1.0, DEPTH), mul)) for _ in range(sequences)]


def rate_of(counts: tuple[int, ...], survivals: list[list[float]], seconds: NDArray[np.float64]) -> float:
    gain = sum(sum(own[:count]) for own, count in zip(survivals, counts, strict=True))
    return float((len(counts) + gain) / seconds[sum(counts), sum(map(bool, counts)), max(counts)])


@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_no_choice_is_faster(sequences: int, seed: int) -> None:
    """Where time depends on nodes, with cliffs, and on the greatest depth; with that of each sequence, hardly any."""
    rng = np.random.default_rng(seed)
    survivals, most = survivals_of(rng, sequences), sequences * DEPTH
    nodes = np.concatenate([[1.0], 1.0 + rng.exponential(0.15, most).cumsum()])
    depth = np.concatenate([[0.0], rng.uniform(0.02, 0.4) * np.arange(1, DEPTH + 1)])
    for crowd, share in ((0.0, 1.0), (0.05, 0.98)):
        each = crowd * np.arange(sequences + 1)
        seconds = nodes[:, None, None] + depth[None, None, :] + each[None, :, None]
        chosen = choose_jointly(Offers.of(survivals), sequences, lambda n, s, d, seconds=seconds: seconds[n, s, d])
        every = [rate_of(counts, survivals, seconds) for counts in product(range(DEPTH + 1), repeat=sequences)]
        rate = rate_of(tuple(chosen.counts), survivals, seconds)
        assert rate >= share * max(every) - 1e-12
        assert chosen.gain == pytest.approx(max(0.0, rate * seconds[0, 0, 0] / sequences - 1))


def test_drafts_that_gain_nothing_are_not_made() -> None:
    def seconds(nodes: NDArray[Any], sequences: NDArray[Any], depth: NDArray[Any]) -> NDArray[Any]:
        return 1.0 + 0.5 * nodes

    offers = Offers.of([[0.52]])
    assert choose_jointly(offers, 1, seconds).counts == [1]
    assert choose_jointly(Offers.of([[0.49]]), 1, seconds) == ([0], 0.0)
    assert choose_jointly(Offers.of([[], []]), 2, seconds) == ([0, 0], 0.0)


def test_trees_are_taken_whole() -> None:
    offers = Offers.of([[1.4], [0.1]], depth=2, nodes=6)
    assert choose_jointly(offers, 2, lambda nodes, sequences, depth: 1.0 + 0.03 * nodes).counts == [6, 0]


@pytest.mark.parametrize("seed", range(10))
def test_drafts_with_scores_are_cut_where_they_stop_paying(seed: int) -> None:
    rng = np.random.default_rng(seed)
    survivals = survivals_of(rng, 2)
    seconds = [1.0, *(1.0 + rng.exponential(0.2, 6).cumsum())]
    counts = choose_scored(survivals, seconds)
    table = np.array(seconds)[:, None, None] * np.ones((1, 3, DEPTH + 1))
    best = max(rate_of(each, survivals, table) for each in product(range(DEPTH + 1), repeat=2))
    assert rate_of((counts[0], counts[1]), survivals, table) == pytest.approx(best)
