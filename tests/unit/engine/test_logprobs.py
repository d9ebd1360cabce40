"""Log-probabilities take bounded memory, whatever the prompt's length, and the same values in any slices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.engine import logprobs
from speculant.engine.logprobs import record_prompt, token_logprobs
from speculant.errors import SpeculantError
from speculant.exactness.tables import TableModel
from speculant.params import SamplingParams
from tests.models import make_request

V = 152_064


class Wide(TableModel):
    """A model of a large vocabulary: a hidden state is where the logits peak."""

    def __init__(self) -> None:
        super().__init__(lambda history: (), V)
        self.largest = 0

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        self.largest = max(self.largest, len(hidden) * V * 4)
        made = torch.zeros(len(hidden), V)
        made[torch.arange(len(hidden)), hidden[:, 0].long()] = 9.0
        return made


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of every table of log-probabilities."""
    sizes, log_softmax = list[int](), torch.log_softmax

    def noting(table: Tensor, **arguments: Any) -> Tensor:
        sizes.append(table.numel() * table.element_size())
        return log_softmax(table, **arguments)

    monkeypatch.setattr(torch, "log_softmax", noting)
    return sizes


def test_prompt_logprobs_of_a_large_vocabulary_are_bounded(tables: list[int]) -> None:
    prompt = [(7919 * i) % V for i in range(120)]
    request, model = make_request(prompt, params=SamplingParams(prompt_logprobs=1)), Wide()
    record_prompt(request, torch.tensor(prompt[1:], dtype=torch.float64)[:, None], model)
    assert max(tables) <= 8 * 2**20
    assert model.largest <= 32 * 2**20
    assert len(request.prompt_logprobs) == 119
    expected = 9.0 - math.log(math.exp(9.0) + V - 1)
    for entry, token in zip(request.prompt_logprobs, prompt[1:], strict=True):
        assert list(entry) == [token]
        assert (entry[token].rank, entry[token].logprob) == (1, pytest.approx(expected, abs=1e-9))


@pytest.mark.parametrize("most", [1, 5, 12, 1000])
def test_slices_change_no_logprob(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = torch.randn(11, 5, generator=torch.Generator().manual_seed(1)), [i % 5 for i in range(11)]
    whole = token_logprobs(logits, tokens, 2)
    monkeypatch.setattr(logprobs, "MOST_LOGPROBS", most)
    assert token_logprobs(logits, tokens, 2) == whole


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logprobs_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(SpeculantError, match="NaN or infinite"):
        token_logprobs(logits, [0, 1, 2], 0)
