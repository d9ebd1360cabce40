"""The only place where a request changes: tokens are appended one by one until something ends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from speculant.beams import Beams, Hypothesis, common_prefix
from speculant.cache import KVCache
from speculant.drafting import Drafters
from speculant.engine.logprobs import record_logprobs, record_prompt
from speculant.engine.runner import Decision, TargetOutput
from speculant.errors import RequestError, SpeculantError
from speculant.lengths import DraftOutcome
from speculant.metrics import StepTiming
from speculant.models import CausalLM
from speculant.types import NOT_ENDED, DraftTree, Ending, Request, StepOutput, Verdict

logger = logging.getLogger(__name__)


class Committed(NamedTuple):
    """The tokens that a request gained in one step, and the outputs for its caller.

    A beam search has no outputs until it is over, and then all its samples' outputs. left: a beam search changed to a
    text that does not continue the earlier one; `tokens` is empty. kept: the draft nodes whose keys and values stay in
    the cache. sampled: the number of samples that got tokens from the pass; the samples of a beam search share its
    passes.
    """

    request: Request
    tokens: list[int]
    outputs: list[StepOutput]
    left: bool = False
    kept: Sequence[int] = ()
    outcome: DraftOutcome | None = None
    sampled: int = 0


def commit_output(
    output: TargetOutput,
    decision: Decision | None,
    timing: StepTiming,
    target: CausalLM,
    cache: KVCache,
    max_model_len: int,
) -> Committed:
    """Commit one sequence's share of a step; an error ends that request and no other.

    decision: None = the sequence has tokens left that are not processed.
    """
    request = output.item.request
    num_output = len(request.tokens) - len(request.prompt)
    if request.stops.checker is not None:
        request.stops.checker.checkpoint()
    try:
        request.metrics.timing.record_pass(timing)
        if isinstance(decision, SpeculantError):
            raise decision
        if output.prompt_hidden is not None:
            record_prompt(request, output.prompt_hidden, target)
        if isinstance(decision, Verdict):
            committed = commit(output, decision, cache, max_model_len, timing.verified)
        elif decision is not None:
            committed = commit_beams(output, decision, cache, timing.verified)
        else:
            committed = Committed(request, [], [])
        cache.insert_prefix(request.seq_id, request.tokens)
        if cache.is_windowed:
            cache.drop_unseen(request.seq_id)
    except Exception as error:  # noqa: BLE001 - no error may affect the other requests
        roll_back(request, num_output)
        return fail(request, error)
    return committed


def commit_measured(
    output: TargetOutput,
    decision: Decision | None,
    timing: StepTiming,
    target: CausalLM,
    cache: KVCache,
    max_model_len: int,
) -> Committed:
    """Commit a share of a sequence whose settings add work to steps, and measure that work; see `commit_output`."""
    work = output.item.request.work
    with work:
        committed = commit_output(output, decision, timing, target, cache, max_model_len)
    work.settle(output.num_results)
    return committed


def notify(drafters: Drafters, outputs: Sequence[TargetOutput], committed: Sequence[Committed]) -> None:
    """Pass the committed rows on to the drafters; a sequence whose text was replaced begins again."""
    for each in committed:
        if each.left:
            drafters.end(each.request)
    if drafters.listens:
        for output, each in zip(outputs, committed, strict=True):
            if not each.left and each.request.ending.error is None and drafters.observes(each.request):
                drafters.observe(each.request, output.committed_rows(each.kept, each.tokens))


def commit(output: TargetOutput, verdict: Verdict, cache: KVCache, max_model_len: int, now: float) -> Committed:
    """Append a verdict's tokens up to the first stop, and make the cache agree.

    Everything after the stop is dropped: tokens, text, log-probabilities, usage, cache.
    Afterwards the cache holds all but the newest token.
    """
    request, tree, path = output.item.request, output.tree, verdict.path
    base = len(request.tokens)
    tokens = _append([*map(tree.token_list.__getitem__, path), verdict.token], request, max_model_len)
    if request.params.logprobs is not None and (logits := output.logits) is not None:
        record_logprobs(request, logits, path, len(tokens))
    kept = path[: len(tokens) - 1]
    if tree.num_rows:
        cache.compact(request.seq_id, base, kept)
    request.rounds += 1
    outcome = _outcome(request, tree, path, len(tokens)) if tree.size else None
    if outcome is not None:
        request.metrics.speculative_decoding.record(tree.size, sum(outcome.accepted), sum(outcome.tested))
    request.metrics.timing.record_tokens(now, len(tokens))
    request.metrics.timing.sampled_passes += 1
    outputs = _outputs(request, tokens, len(path))
    if tree.size and len(outputs) > len(path):
        siblings = tree.child_tokens(path[-1] if path else -1)
        outputs[-1].rejected = tuple(filter(verdict.token.__ne__, siblings))
    return Committed(request, tokens, outputs, kept=kept, outcome=outcome, sampled=1)


def _outcome(request: Request, tree: DraftTree, path: tuple[int, ...], committed: int) -> DraftOutcome:
    """Return the outcome of a draft, up to the `committed` tokens before a stop."""
    drafted = [1] * tree.size if tree.is_chain else [*map(tree.depths.count, range(1, 1 + max(tree.depths)))]
    accepted, depth = min(len(path), committed), len(drafted)
    reached = len(path) + tree.has_children(path[-1] if path else -1)
    tested = max(accepted, min(reached, committed))
    ones = [1] * tested + [0] * (depth - tested), [1] * accepted + [0] * (depth - accepted)
    return DraftOutcome(request, drafted, *ones, path[:accepted], tree.num_rows - tree.size)


def commit_beams(output: TargetOutput, beams: Beams, cache: KVCache, now: float) -> Committed:
    """Continue a beam search with `beams`, or end all its samples with them; make tokens and cache agree.

    The cache keeps the positions of the new trunk, or of the best finished hypothesis, without the newest token.
    """
    request, search = output.item.request, output.item.request.search
    assert search is not None, "this is no beam search"
    before = search.beams
    _record_rounds(output, before, beams)
    request.rounds += 1
    request.metrics.timing.sampled_passes += 1
    search.beams = beams
    if beams.live:
        return _follow(output, before.trunk, beams.trunk, cache)
    found = beams.finished[: len(search.samples)]
    none = Committed(request, [], [], sampled=len(search.samples))
    committed = _follow(output, before.trunk, found[0], cache) if found else none
    for sample in search.samples[1:]:
        sample.metrics.timing.share_passes(request.metrics.timing)
    for sample, hypothesis in zip_longest(search.samples, found):
        committed.outputs.extend(_end_without(sample) if hypothesis is None else _become(sample, hypothesis, now))
    search.results = found
    return committed


def _record_rounds(output: TargetOutput, before: Beams, beams: Beams) -> None:
    """Count the accepted rounds of a draft: every round that a pass takes beyond its first."""
    live = before.rounds - before.trunk.length  # how deep the live hypotheses lie
    deepest = max(output.tree.depths, default=0)
    num_drafted = sum(depth > live for depth in output.tree.depths)
    if num_drafted:
        accepted = beams.rounds - before.rounds - 1
        tested = accepted + (bool(beams.live) and accepted < deepest - live)
        output.item.request.metrics.speculative_decoding.record(num_drafted, accepted, tested)


def _follow(output: TargetOutput, trunk: Hypothesis, goal: Hypothesis, cache: KVCache) -> Committed:
    """Make `goal` the output of a search in place of `trunk`."""
    request, base = output.item.request, len(output.item.request.tokens)
    agreed = common_prefix((trunk, goal)).length
    tokens = goal.tokens(start=agreed)
    path = list[int]()
    if (length := len(request.prompt) + min(agreed, goal.length - 1)) < base:
        cache.truncate_to(request.seq_id, length if cache.holds_window(request.seq_id, length) else 0)
    else:
        path = output.tree.path_along(tokens[:-1])
        cache.compact(request.seq_id, base, path)
    request.shorten(len(request.prompt) + agreed)
    request.extend(tokens)
    left = agreed < trunk.length
    samples = 1 if request.search is None else len(request.search.samples)
    return Committed(request, [] if left else tokens, [], left, path, sampled=samples)


def _become(request: Request, hypothesis: Hypothesis, now: float) -> list[StepOutput]:
    """End a request with a finished hypothesis."""
    tokens = hypothesis.tokens()
    request.shorten(len(request.prompt))
    request.extend(tokens)
    stopped = tokens[-1] in request.stops.end_token_ids
    request.ending = Ending("stop" if stopped else "length", request.stops.reason(tokens[-1]))
    if (checker := request.stops.checker) is not None:
        for token in tokens[:-1]:
            checker.push(token)
        last = checker.push_end if stopped else checker.push
        last(tokens[-1])
    request.metrics.timing.record_tokens(now, len(tokens))
    return _outputs(request, tokens, 0)


def _end_without(request: Request) -> list[StepOutput]:
    """End a request for which a search found no hypothesis: there are too few possible texts."""
    problem = f"n={request.params.n} hypotheses were requested and there are {request.index} possible texts"
    return [_fail(request, RequestError(problem, "lower n, or ban fewer tokens."))]


def fail(request: Request, error: Exception) -> Committed:
    """End a request by an error; earlier tokens stay. A beam search ends with all its samples."""
    logger.info("request %s failed: %r", request.request_id, error)
    if request.search is not None:
        request.search.results = ()
    return Committed(request, [], [_fail(each, error) for each in ending_with(request)])


def ending_with(request: Request) -> Sequence[Request]:
    """Return the requests that end when this one does: all samples of a beam search, else itself."""
    return (request,) if request.search is None else request.search.samples


def _fail(request: Request, error: Exception) -> StepOutput:
    request.ending = Ending("error", error=error)
    if request.search is not None:  # the common prefix of its hypotheses is not a result
        request.shorten(len(request.prompt))
    rate = request.metrics.speculative_decoding.draft_acceptance_rate
    return StepOutput(request.request_id, request.index, None, False, "error", acceptance_rate=rate)


def roll_back(request: Request, num_output: int) -> None:
    """Roll back the tokens that a failed step had begun to commit; no caller has seen them."""
    length = len(request.prompt) + num_output
    if request.constraint is not None and length < len(request.tokens):
        with suppress(Exception):  # the request ends with the first error
            request.constraint.rollback(len(request.tokens) - length)
    request.shorten(length)
    del request.logprobs[num_output:]
    request.ending = NOT_ENDED
    for each in ending_with(request):
        if each.stops.checker is not None:
            each.stops.checker.rollback()


def _append(tokens: Sequence[int], request: Request, max_model_len: int) -> list[int]:
    """Append tokens up to the one that ends the request: by an end, its constraint or its length; return them."""
    params, checker, constraint, committed = request.params, request.stops.checker, request.constraint, list[int]()
    before = len(request.tokens) - len(request.prompt)
    room = max_model_len - len(request.tokens)
    if params.max_tokens is not None:
        room = min(room, params.max_tokens - before)
    try:
        for token in tokens:
            if constraint is not None:
                constraint.advance([token])
                request.extend([token])  # which constraints read
            committed.append(token)
            may_stop = before + len(committed) >= params.min_tokens
            if may_stop and token in request.stops.end_token_ids:
                request.ending = Ending("stop", request.stops.reason(token))
                if checker is not None:
                    checker.push_end(token)
            elif checker is not None and (stop_string := checker.push(token)) is not None and may_stop:
                request.ending = Ending("stop", stop_string)
            elif constraint is not None and constraint.is_done:
                request.ending = Ending("stop")
            elif len(committed) >= room:
                request.ending = Ending("length")
            if request.ending.reason is not None:
                break
    finally:  # an error in the middle is rolled back from here
        if constraint is None:
            request.extend(committed)
    return committed


def _outputs(request: Request, tokens: Sequence[int], num_drafted: int) -> list[StepOutput]:
    outputs = list[StepOutput]()
    for place, token in enumerate(tokens):
        outputs.append(StepOutput(request.request_id, request.index, token, place < num_drafted))
    if request.ending.reason is not None:
        outputs[-1].finish_reason = request.ending.reason
        outputs[-1].acceptance_rate = request.metrics.speculative_decoding.draft_acceptance_rate
    return outputs
