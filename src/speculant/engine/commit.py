"""The only place where a request changes: tokens are appended one by one until something ends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from speculant.beams import Beams, Hypothesis
from speculant.cache.base import KVCache
from speculant.engine.runner import TargetOutput
from speculant.errors import RequestError
from speculant.types import Logprob, Logprobs, Request, StepOutput, Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """The tokens a request gained in one step, and how they are told to the caller.

    A beam search tells nothing until it is over, and then its siblings's tokens too. left: its text does not go
    on from the one before, so that `tokens` are none.
    """

    request: Request
    tokens: list[int]
    outputs: list[StepOutput]
    left: bool = False


def commit(fed: TargetOutput, verdict: Verdict, cache: KVCache, max_model_len: int, now: float) -> Committed:
    """Append a verdict's tokens up to the first stop, and make the cache agree.

    What lies behind the stop is dropped everywhere: tokens, text, log-probabilities, usage, cache.
    Afterwards the cache holds all but the newest token.
    """
    request, tree = fed.item.request, fed.tree
    base = len(request.tokens)
    tokens = _append([*(tree.token_list[node] for node in verdict.path), verdict.token], request, max_model_len)
    _record_logprobs(request, fed, verdict, len(tokens))
    cache.compact(request.seq_id, base, verdict.path[: len(tokens) - 1])
    request.rounds += 1
    if tree.size:
        accepted = min(len(verdict.path), len(tokens))
        tested = len(verdict.path) + bool(tree.children(verdict.path[-1] if verdict.path else -1))
        request.metrics.speculative_decoding.record(tree.size, accepted, max(accepted, min(tested, len(tokens))))
    request.metrics.timing.record_tokens(now, len(tokens))
    return Committed(request, tokens, _outputs(request, tokens, len(verdict.path)))


def commit_beams(fed: TargetOutput, beams: Beams, cache: KVCache, now: float) -> Committed:
    """Let a beam search go on from `beams`, or end with them; make tokens and cache agree.

    Of what was fed the cache keeps what is the trunk's, or the winner's, but for its newest token.
    """
    request = fed.item.request
    _record_rounds(fed, beams)
    request.rounds += 1
    request.beams = beams
    if beams.live:
        return _follow(fed, beams.trunk, cache)
    committed = _follow(fed, beams.finished[0].tokens, cache) if beams.finished else Committed(request, [], [])
    for each, hypothesis in zip_longest(request.outcomes, beams.finished[: len(request.outcomes)]):
        committed.outputs.extend(_end_without(each) if hypothesis is None else _become(each, hypothesis, now))
    return committed


def _record_rounds(fed: TargetOutput, beams: Beams) -> None:
    """Count what a draft was good for: every round that a pass takes beyond its first."""
    request = fed.item.request
    live = request.reached - len(request.tokens)  # how deep the live hypotheses lie
    drafted = [depth - live for depth in fed.tree.depths if depth > live]
    if drafted:
        stood = len(request.prompt) + beams.rounds - request.reached - 1
        tested = stood + (bool(beams.live) and stood < max(drafted))
        request.metrics.speculative_decoding.record(len(drafted), stood, tested)


def _follow(fed: TargetOutput, text: Sequence[int], cache: KVCache) -> Committed:
    """Make `text` the output of a search."""
    request, base = fed.item.request, len(fed.item.request.tokens)
    tokens = [*request.prompt, *text]
    agreed = next((i for i, (old, new) in enumerate(zip(request.tokens, tokens, strict=False)) if old != new), base)
    kept = min(agreed, len(tokens) - 1)
    if kept < base:
        cache.truncate_to(request.seq_id, kept)
    else:
        cache.compact(request.seq_id, base, fed.tree.path_along(tokens[base:-1]))
    request.tokens = tokens
    return Committed(request, tokens[base:] if agreed == base else [], [], left=agreed < base or len(tokens) < base)


def _become(request: Request, hypothesis: Hypothesis, now: float) -> list[StepOutput]:
    """End a request with a finished hypothesis."""
    request.tokens = [*request.prompt, *hypothesis.tokens]
    request.hypothesis = hypothesis
    stopped = hypothesis.tokens[-1] in request.end_token_ids
    request.finish_reason, request.stop_reason = ("stop", hypothesis.tokens[-1]) if stopped else ("length", None)
    for token in hypothesis.tokens:
        if request.stop_checker is not None:
            request.stop_checker.push(token)
    request.metrics.timing.record_tokens(now, len(hypothesis.tokens))
    return _outputs(request, hypothesis.tokens, 0)


def _end_without(request: Request) -> list[StepOutput]:
    """End a request for which a search found no hypothesis: there are too few possible texts."""
    asked = f"n={request.params.n} hypotheses were asked for and there are {request.index} possible texts"
    return [_fail(request, RequestError(asked, "lower n, or ban fewer tokens."))]


def fail(request: Request, error: Exception) -> Committed:
    """End a request by an error; what was committed before stays. With a beam search end its siblings."""
    logger.info("request %s failed: %r", request.request_id, error)
    return Committed(request, [], [_fail(each, error) for each in request.outcomes])


def _fail(request: Request, error: Exception) -> StepOutput:
    request.finish_reason, request.error = "error", error
    if request.params.beam_width is not None:  # what its hypotheses begin with is no part of a result yet
        request.tokens, request.hypothesis, request.stop_reason = list(request.prompt), None, None
    rate = request.metrics.speculative_decoding.draft_acceptance_rate
    return StepOutput(request.request_id, request.index, None, False, "error", acceptance_rate=rate)


def roll_back(request: Request, num_output: int) -> None:
    """Forget what a failed step had begun to commit: nobody was told."""
    del request.tokens[len(request.prompt) + num_output :]
    del request.logprobs[num_output:]
    request.stop_reason = None


def _append(tokens: Sequence[int], request: Request, max_model_len: int) -> list[int]:
    committed = []
    for token in tokens:
        request.tokens.append(token)
        committed.append(token)
        request.finish_reason, request.stop_reason = _why_finished(request, token, max_model_len)
        if request.finished:
            break
    return committed


def _why_finished(request: Request, token: int, max_model_len: int) -> tuple[str | None, int | str | None]:
    """Say whether a request that just gained `token` is over; an end token or stop string comes first."""
    stop_string = request.stop_checker.push(token) if request.stop_checker else None
    if request.num_output >= request.params.min_tokens:
        if token in request.end_token_ids:
            return "stop", token
        if stop_string is not None:
            return "stop", stop_string
    if request.num_output == request.params.max_tokens or len(request.tokens) >= max_model_len:
        return "length", None
    return None, None


def _outputs(request: Request, tokens: Sequence[int], num_drafted: int) -> list[StepOutput]:
    outputs = [StepOutput(request.request_id, request.index, t, i < num_drafted) for i, t in enumerate(tokens)]
    if request.finished:
        rate = request.metrics.speculative_decoding.draft_acceptance_rate
        last = outputs[-1]
        outputs[-1] = StepOutput(
            last.request_id, last.index, last.token, last.drafted, request.finish_reason, acceptance_rate=rate
        )
    return outputs


def _record_logprobs(request: Request, fed: TargetOutput, verdict: Verdict, count: int) -> None:
    if request.params.logprobs is None or fed.logits is None:
        return
    rows = [0, *(1 + node for node in verdict.path)][:count]  # a token's distribution is its parent's row
    request.logprobs += token_logprobs(fed.logits[rows], request.tokens[-count:], request.params.logprobs)


def record_prompt(request: Request, logits: Tensor) -> None:
    """Note log-probabilities of the next prompt tokens; logits are [m, V]."""
    first = len(request.prompt_logprobs) + 1  # nothing precedes the first token
    following = request.prompt[first : first + len(logits)]
    request.prompt_logprobs += token_logprobs(logits, following, request.params.prompt_logprobs or 0)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprobs]:
    """Return, for each row of logits [m, V], the log-probability and rank of tokens[i] and of the `top` best."""
    table = torch.log_softmax(logits.to(torch.float64), dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])
    ranks = (table > chosen).sum(-1) + 1
    best = table.topk(min(top, table.shape[-1]), dim=-1)
    tops = [_ranked(*row) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    columns = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), tops, strict=True)
    return [{**others, token: Logprob(value, rank)} for token, value, rank, others in columns]


def _ranked(tokens: list[int], values: list[float]) -> dict[int, Logprob]:
    return {token: Logprob(value, 1 + i) for i, (token, value) in enumerate(zip(tokens, values, strict=True))}
