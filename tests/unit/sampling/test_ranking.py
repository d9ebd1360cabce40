"""The likeliest tokens of a distribution, in an order that nothing else can change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speculant.kernels import REFERENCE, SamplingSettings
from speculant.sampling import GROUP, most_likely, rank, top_tokens


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


# --- the largest logits of a row, found by groups, are those of torch.topk


@pytest.mark.parametrize("count", [1, 8, 100])
@pytest.mark.parametrize("vocab_size", [3, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP, 1000, 8192])
def test_top_tokens_are_those_of_topk(vocab_size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.sampling.choice.FEW", 0)
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size + count))
    expected = logits.topk(min(count, vocab_size), dim=-1).indices
    assert torch.equal(top_tokens(logits, count), expected)


def test_top_tokens_of_neighbours_and_ties_are_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.sampling.choice.FEW", 0)
    logits = torch.zeros(2, 5 * GROUP)
    logits[0, 70:74] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # all in one group
    assert top_tokens(logits, 4)[0].tolist() == [70, 71, 72, 73]
    assert len(set(top_tokens(logits, 8)[1].tolist())) == 8


def test_few_logits_are_ranked_at_once() -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0]])
    assert top_tokens(logits, 3).tolist() == [[1, 3, 0]]
    assert top_tokens(logits, 9).tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_most_likely_tokens_are_those_of_greedy_distributions(dtype: torch.dtype) -> None:
    logits = torch.randint(-4, 4, (200, 9), generator=torch.Generator().manual_seed(1)).to(dtype)  # with many ties
    logits[::3, 2] = -math.inf
    tokens, largest = most_likely(logits)
    probs = REFERENCE.distribution(logits, [SamplingSettings(0.0)] * len(logits), [None] * len(logits))
    assert tokens == probs.argmax(-1).tolist()
    assert largest == logits.amax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_largest_logit_show_why(dtype: torch.dtype) -> None:
    rows = [[0.0, math.nan, math.inf], [1.0, math.inf, 0.0], [-math.inf] * 3, [0.0, 2.0, -math.inf]]
    largest = most_likely(torch.tensor(rows, dtype=dtype))[1]
    assert math.isnan(largest[0])
    assert largest[1:] == [math.inf, -math.inf, 2.0]
