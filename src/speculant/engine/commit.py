"""The only place where a request changes: tokens are appended one by one until something ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from speculant.beams import Beams, Hypothesis
from speculant.cache.base import KVCache
from speculant.engine.logprobs import record_logprobs
from speculant.engine.runner import TargetOutput
from speculant.errors import RequestError
from speculant.types import Request, StepOutput, Verdict


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
    record_logprobs(request, fed, verdict, len(tokens))
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
    request.shorten(min(agreed, len(tokens)))
    request.extend(tokens[agreed:])
    return Committed(request, tokens[base:] if agreed == base else [], [], left=agreed < base or len(tokens) < base)


def _become(request: Request, hypothesis: Hypothesis, now: float) -> list[StepOutput]:
    """End a request with a finished hypothesis."""
    request.shorten(len(request.prompt))
    request.extend(hypothesis.tokens)
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
    return Committed(request, [], [_fail(each, error) for each in request.outcomes])


def _fail(request: Request, error: Exception) -> StepOutput:
    request.finish_reason, request.error = "error", error
    if request.params.beam_width is not None:  # what its hypotheses begin with is no part of a result yet
        request.shorten(len(request.prompt))
        request.hypothesis, request.stop_reason = None, None
    rate = request.metrics.speculative_decoding.draft_acceptance_rate
    return StepOutput(request.request_id, request.index, None, False, "error", acceptance_rate=rate)


def roll_back(request: Request, num_output: int) -> None:
    """Forget what a failed step had begun to commit: nobody was told."""
    length = len(request.prompt) + num_output
    if request.constraint is not None and length < len(request.tokens):
        request.constraint.rollback(len(request.tokens) - length)
    request.shorten(length)
    del request.logprobs[num_output:]
    request.stop_reason = None


def _append(tokens: Sequence[int], request: Request, max_model_len: int) -> list[int]:
    committed = []
    for token in tokens:
        if request.constraint is not None:
            request.constraint.advance([token])
        request.extend([token])
        committed.append(token)
        request.finish_reason, request.stop_reason = _why_finished(request, token, max_model_len)
        if request.finished:
            break
    return committed


def _why_finished(request: Request, token: int, max_model_len: int) -> tuple[str | None, int | str | None]:
    """Say whether a request that just gained `token` is over: by an end, its constraint or its length."""
    stop_string = request.stop_checker.push(token) if request.stop_checker else None
    if request.num_output >= request.params.min_tokens:
        if token in request.end_token_ids:
            return "stop", token
        if stop_string is not None:
            return "stop", stop_string
    if request.constraint is not None and request.constraint.is_done:
        return "stop", None
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
