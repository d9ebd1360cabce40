"""Log-probabilities take bounded memory, whatever the prompt's length, and the same values in any slices."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.engine import LogprobRow, logprobs, record_prompt, token_logprobs
from speculant.errors import SpeculantError
from speculant.lab.exactness import TableModel
from speculant.params import SamplingParams
from speculant.types import Logprob, Logprobs
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


def rows_of(count: int = 3, top: int = 2) -> list[Logprobs]:
    logits = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    return token_logprobs(logits, [5] * count, top)


def test_alternatives_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 1,000 tokens with 100 alternatives would hold a step for as long as it takes to make 100,000."""
    made = list[int]()

    def counted(*arguments: Any) -> Logprob:
        made.append(1)
        return Logprob(*arguments)

    monkeypatch.setattr(logprobs, "Logprob", counted)
    prompt = [i % V for i in range(51)]
    request = make_request(prompt, params=SamplingParams(prompt_logprobs=20))
    record_prompt(request, torch.tensor(prompt[1:], dtype=torch.float64)[:, None], Wide())
    assert len(made) == 50, "those of the prompt's own tokens"
    assert request.prompt_logprobs[0][1].rank == 1
    assert len(made) == 50
    assert len(request.prompt_logprobs[0]) == 20
    assert len(made) <= 50 + 21


def test_row_of_logprobs_is_a_mapping() -> None:
    for row in rows_of():
        values = dict(row.items())
        assert (row == values, values == row, len(row), list(row)) == (True, True, len(values), list(values))
        assert [row[token] for token in row] == list(values.values())
        assert repr(row) == repr(values)
        assert pickle.loads(pickle.dumps(row)) == values == copy.deepcopy(row)
        assert row.get(99) is None
        assert list(values)[:2] == sorted(values, key=lambda token: -values[token].logprob)[:2]


def test_token_of_a_row_is_decoded_when_it_is_read_and_once() -> None:
    decoded = list[int]()

    def text_of(token: int) -> str:
        decoded.append(token)
        return f"<{token}>"

    cached = functools.cache(text_of)
    rows = [row.with_texts(cached) for row in rows_of(20) if isinstance(row, LogprobRow)]
    assert not decoded
    assert all(value.decoded_token == f"<{token}>" for row in rows for token, value in row.items())
    assert all(row[5].decoded_token == "<5>" for row in rows)
    assert len(decoded) == len(set(decoded))
