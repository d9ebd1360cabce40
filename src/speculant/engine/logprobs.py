"""Log-probabilities for callers, of the model's own distribution; in slices of rows, so that the memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speculant.engine.failures import not_finite
from speculant.engine.runner import TargetOutput
from speculant.models.base import CausalLM
from speculant.types import Logprob, Logprobs, Request, Verdict

MOST_LOGITS = 2**23  # of prompt rows at a time: 32 MB in float32; fewer rows read the head's weights more often
MOST_LOGPROBS = 2**20  # at a time: 8 MB in float64


def record_logprobs(request: Request, output: TargetOutput, verdict: Verdict, count: int) -> None:
    """Note log-probabilities of the last `count` tokens, which a verdict gave, if they are asked for."""
    if request.params.logprobs is None or output.logits is None:
        return
    rows = [0, *(1 + node for node in verdict.path)][:count]  # a token's distribution is its parent's row
    request.logprobs += token_logprobs(output.logits[rows], request.tokens[-count:], request.params.logprobs)


def record_prompt(request: Request, hidden: Tensor, model: CausalLM) -> None:
    """Note log-probabilities of the next prompt tokens, for the hidden states [m, hidden] before them."""
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
    tops = [_ranked(*row) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    values = chosen[:, 0].tolist()
    if any(map(math.isnan, values)):
        raise not_finite()
    columns = zip(tokens, values, ranks.tolist(), tops, strict=True)
    return ({**others, token: Logprob(value, rank)} for token, value, rank, others in columns)


def _ranked(tokens: list[int], values: list[float]) -> dict[int, Logprob]:
    return {token: Logprob(value, 1 + i) for i, (token, value) in enumerate(zip(tokens, values, strict=True))}
