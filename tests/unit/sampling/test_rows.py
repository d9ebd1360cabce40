"""The largest logits of a row, found by groups, are those of torch.topk."""

from __future__ import annotations

import math

import pytest
import torch

from speculant.kernels import REFERENCE, SamplingSettings
from speculant.sampling import GROUP, most_likely, top_tokens


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
