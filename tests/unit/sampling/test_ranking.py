"""The likeliest tokens of a distribution, in an order that nothing else can change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speculant.sampling.distribution import rank


def distribution(*weights: float) -> Tensor:
    return torch.tensor([weights], dtype=torch.float64) / sum(weights)


def tokens(distributions: Tensor, count: int) -> list[list[int]]:
    return [[token for token, _ in each] for each in rank(distributions, count)]


def test_the_best_come_first_with_their_log_probabilities() -> None:
    (best,) = rank(distribution(1, 4, 2, 1), 2)
    assert best == ((1, math.log(0.5)), (2, math.log(0.25)))


def test_ties_go_to_the_lowest_ids() -> None:
    assert tokens(distribution(1, 2, 1, 2, 1, 2), 2) == [[1, 3]]
    assert tokens(distribution(1, 2, 1, 2, 1, 2), 4) == [[1, 3, 5, 0]]
    assert tokens(torch.full((1, 5000), 1 / 5000, dtype=torch.float64), 3) == [[0, 1, 2]]


@pytest.mark.parametrize("count", [2, 3, 9])
def test_impossible_tokens_are_left_out(count: int) -> None:
    assert tokens(distribution(0, 3, 0, 1), count) == [[1, 3]]
    assert tokens(torch.full((1, 3), math.nan, dtype=torch.float64), count) == [[]]


def test_a_row_is_ranked_by_itself() -> None:
    distributions = torch.rand(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert rank(distributions, 5) == [rank(row[None], 5)[0] for row in distributions]
    assert rank(distributions, 5) == [each[:5] for each in rank(distributions, 20)]


def test_ranking_has_the_best_ends_and_the_best_others() -> None:
    probs = torch.rand(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ends = {*range(3, 33)}
    for row, ranked in zip(probs, rank(probs, 4, ends), strict=True):
        order = sorted(range(40), key=lambda token: -float(row[token]))
        wanted = {*order[:4], *[token for token in order if token not in ends][:4]}
        assert [token for token, _ in ranked] == [token for token in order if token in wanted]
