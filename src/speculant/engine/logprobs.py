"""Log-probabilities for callers, of the model's own distribution; in slices of rows, so that the memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculant.engine.runner import not_finite
from speculant.models import CausalLM
from speculant.types import Logprob, Logprobs, Request

TextOf = Callable[[int], str | None]
MOST_LOGITS = 2**23  # of prompt rows at a time: 32 MB in float32; fewer rows read the head's weights more often
MOST_LOGPROBS = 2**20  # at a time: 8 MB in float64


def record_logprobs(request: Request, logits: Tensor, path: Sequence[int], count: int) -> None:
    """Record log-probabilities of the last `count` tokens: an accepted path, and the token after it.

    logits: those after the root and each node of the draft.
    """
    rows = [0, *(1 + node for node in path)][:count]  # a token's distribution is its parent's row
    request.logprobs += token_logprobs(logits[rows], request.tokens[-count:], request.params.logprobs or 0)


def record_prompt(request: Request, hidden: Tensor, model: CausalLM) -> None:
    """Record log-probabilities of the next prompt tokens, for the hidden states [m, hidden] before them."""
    for rows in _slices(len(hidden), MOST_LOGITS // model.vocab_size):
        first = len(request.prompt_logprobs) + 1  # nothing precedes the first token
        logits = model.logits(hidden[rows])
        following = request.prompt[first : first + len(logits)]
        request.prompt_logprobs += token_logprobs(logits, following, request.params.prompt_logprobs or 0)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprobs]:
    """Return, for each row of logits [m, V], the log-probability and rank of tokens[i] and of the `top` best; -1 = all.

    Raises SpeculantError for a row that has none.
    """
    entries: list[Logprobs] = []
    for rows in _slices(len(tokens), MOST_LOGPROBS // logits.shape[-1]):
        entries += _slice_logprobs(logits[rows], tokens[rows], top)
    return entries


def _slices(count: int, most: int) -> Iterator[slice]:
    """Cut `count` rows into slices of at most `most`, but at least one."""
    size = max(1, most)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _slice_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> Iterator[Logprobs]:
    table = torch.log_softmax(logits.to(torch.float64), dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])
    ranks = (table > chosen).sum(-1) + 1
    size = table.shape[-1]
    best = table.topk(size if top < 0 else min(top, size), dim=-1)
    values = chosen[:, 0].tolist()
    if any(map(math.isnan, values)):
        raise not_finite()
    chosen_ones = [Logprob(value, rank) for value, rank in zip(values, ranks.tolist(), strict=True)]
    best_ones = _Best(best.indices.cpu().numpy(), best.values.cpu().numpy())
    rows = enumerate(zip(tokens, chosen_ones, strict=True))
    return (LogprobRow(token, logprob, best_ones, row) for row, (token, logprob) in rows)


class _Best(NamedTuple):
    """The most likely tokens after several places, int64 [m, k], and their log-probabilities, float64 [m, k]."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float64]


class LogprobRow(Mapping[int, Logprob]):
    """The log-probabilities at one position; the alternatives' are made when they are first read.

    A prompt of 1,000 tokens with 100 alternatives has 100,000 of them. Making them all takes longer than a step, and
    would delay an event loop. text_of: returns a token's text; None = the texts are not known. Pickled, it is a dict.
    """

    __slots__ = ("_best", "_chosen", "_made", "_row", "_text_of", "_token")

    def __init__(self, token: int, chosen: Logprob, best: _Best, row: int, text_of: TextOf | None = None) -> None:
        self._token, self._chosen, self._best, self._row, self._text_of = token, chosen, best, row, text_of
        self._made: dict[int, Logprob] | None = None

    def __getitem__(self, token: int) -> Logprob:
        if token != self._token:
            return self._all[token]
        return self._chosen if self._text_of is None else replace(self._chosen, decoded_token=self._text_of(token))

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._all,)

    def with_texts(self, text_of: TextOf) -> LogprobRow:
        """Return the same with the texts of the tokens; a text is made when it is first read."""
        return LogprobRow(self._token, self._chosen, self._best, self._row, text_of)

    @property
    def _all(self) -> dict[int, Logprob]:
        """Everything, the most likely tokens first."""
        if self._made is None:
            tokens, values = (array[self._row].tolist() for array in self._best)
            text_of = self._text_of or _no_text
            pairs = enumerate(zip(tokens, values, strict=True), 1)
            made = {token: Logprob(value, rank, text_of(token)) for rank, (token, value) in pairs}
            self._made = {**made, self._token: self[self._token]}
        return self._made


def _no_text(token: int) -> None:
    return None
