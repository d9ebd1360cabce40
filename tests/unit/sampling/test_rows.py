"""The largest logits of a row, found by groups, are those of torch.topk."""

from __future__ import annotations

import pytest
import torch

from speculant.sampling.rows import GROUP, top_tokens


@pytest.mark.parametrize("count", [1, 8, 100])
@pytest.mark.parametrize("vocab_size", [3, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP, 1000, 8192])
def test_top_tokens_are_those_of_topk(vocab_size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.sampling.rows.FEW", 0)
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size + count))
    expected = logits.topk(min(count, vocab_size), dim=-1).indices
    assert torch.equal(top_tokens(logits, count), expected)


def test_top_tokens_of_neighbours_and_ties_are_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.sampling.rows.FEW", 0)
    logits = torch.zeros(2, 5 * GROUP)
    logits[0, 70:74] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # all in one group
    assert top_tokens(logits, 4)[0].tolist() == [70, 71, 72, 73]
    assert len(set(top_tokens(logits, 8)[1].tolist())) == 8


def test_few_logits_are_ranked_at_once() -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0]])
    assert top_tokens(logits, 3).tolist() == [[1, 3, 0]]
    assert top_tokens(logits, 9).tolist() == [[1, 3, 0, 2]]
