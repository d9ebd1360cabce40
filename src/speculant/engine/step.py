"""One step of the engine, which is the whole algorithm: draft, verify in one target pass, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from speculant.beams import Beams
from speculant.cache.base import KVCache
from speculant.config import Limits
from speculant.constraints import forced_tokens, prepare_masks
from speculant.engine.commit import Committed, commit, commit_beams, fail, roll_back
from speculant.engine.drafters import Drafters
from speculant.engine.failures import advance_sound, failure_of, verify_sound
from speculant.engine.logprobs import record_prompt
from speculant.engine.profiling import Mark, unmarked
from speculant.engine.runner import TargetOutput, forward_target, with_successors
from speculant.errors import SpeculantError
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.lengths.guarded import GuardedLength
from speculant.lengths.limits import NO_DRAFT, DraftBounds, draft_limits
from speculant.metrics import StepTiming
from speculant.models.base import CausalLM
from speculant.params import MAX_SPECULATIVE_TOKENS
from speculant.sampling.chance import Chances
from speculant.sampling.distribution import Node, distribution
from speculant.sampling.rows import row_maxima
from speculant.scheduling.scheduler import Schedule, Scheduled
from speculant.types import CommittedRows, DraftTree, Request, Verdict, state_rows
from speculant.verification.base import Verifier, verifier_for

MOST_PROBS_BYTES = 2**28  # of the distributions after all draft nodes of a step
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepContext:
    """What a step works with; `verifiers` by name, and the `sampler` that makes the distributions."""

    limits: Limits
    target: CausalLM
    cache: KVCache
    drafters: Drafters
    draft_length: GuardedLength
    verifiers: dict[str, Verifier]
    chances: Chances
    sampler: Sampler = REFERENCE


@torch.inference_mode()
def step(context: StepContext, schedule: Schedule, mark: Mark = unmarked) -> tuple[list[Committed], StepTiming]:
    """Feed every scheduled sequence once and commit what the target agrees to.

    An error before the first commit leaves every request and the cache as they were. `mark` shows the phases
    to a profiler.
    """
    started = time.perf_counter()
    try:
        with mark("draft"):
            forced = forced_drafts(context, schedule)
            trees = propose(context, schedule, forced)
        prepare(schedule, trees)
        drafted = time.perf_counter()
        with mark("target pass"):
            layers = context.drafters.hidden_layers
            outputs, logits = forward_target(context.target, context.cache, schedule.items, trees, layers)
            if context.drafters.read_successors:
                outputs = with_successors(outputs, context.drafters.target_top_k)
        with mark("verify"):
            verdicts = verify(context, [each for each in outputs if each.logits is not None], logits)
    except BaseException as error:
        logger.info("a step of %d sequences failed and is rolled back: %r", len(schedule.items), error)
        take_back(context.cache, schedule.items)
        raise
    timing = StepTiming(started, drafted, time.perf_counter())
    with mark("commit"):
        committed = [commit_sequence(context, each, verdicts.get(each.item.request.seq_id), timing) for each in outputs]
    if context.drafters and (forced or not context.draft_length.resting):
        outcomes = [each.outcome for each in committed if each.outcome and each.request.seq_id not in forced]
        if outcomes or not forced:
            context.draft_length.observe(outcomes, timing._replace(committed=time.perf_counter()))
    return committed, timing


def forced_drafts(context: StepContext, schedule: Schedule) -> dict[int, list[int]]:
    """Return by sequence what a constraint forces to come next: a draft that is accepted for certain."""
    forced, vocab_size = dict[int, list[int]](), context.target.vocab_size
    for item in schedule.items:
        request = item.request
        if request.constraint is None or request.drafter is None:
            continue
        if item.decodes and request.num_speculative_tokens != 0:
            forced[request.seq_id] = forced_tokens(request.constraint, vocab_size)[:MAX_SPECULATIVE_TOKENS]
    return {seq_id: tokens for seq_id, tokens in forced.items() if tokens}


def propose(context: StepContext, schedule: Schedule, forced: Mapping[int, list[int]]) -> list[DraftTree]:
    """Ask drafters for a tree per sequence, within each one's limit; a beam search has one without a drafter.

    A sequence whose next tokens are forced gets these instead, whatever its drafter and the policy say.
    """
    if not context.drafters or (context.draft_length.rests(schedule) and not forced):
        return [item.tree for item in schedule.items]
    requests = [item.request for item in schedule.items]
    context.drafters.begin(requests)
    wishes, vocab_size = context.draft_length.choose(schedule), context.target.vocab_size
    if not any(wishes) and not forced and not context.draft_length.keeps_up:
        return [item.tree for item in schedule.items]
    certain = [forced.get(request.seq_id, ()) for request in requests]
    wishes = [len(tokens) or wish for tokens, wish in zip(certain, wishes, strict=True)]
    bounds = [draft_bounds(context, each, bool(tokens)) for each, tokens in zip(requests, certain, strict=True)]
    limits = draft_limits(schedule, wishes, bounds, MOST_PROBS_BYTES // (8 * vocab_size))
    asked = [0 if tokens else limit for limit, tokens in zip(limits, certain, strict=True)]
    drafts = context.draft_length.trim(requests, context.drafters.propose(requests, asked, vocab_size))
    if context.draft_length.keeps_up:
        context.drafters.catch_up([request for request, limit in zip(requests, asked, strict=True) if not limit])
    drafts = [
        DraftTree.chain(list(tokens[:limit])) if tokens else draft
        for draft, tokens, limit in zip(drafts, certain, limits, strict=True)
    ]
    each = zip(schedule.items, limits, drafts, strict=True)
    return [draft if limit and (draft.size or draft.ahead is not None) else item.tree for item, limit, draft in each]


def prepare(schedule: Schedule, trees: Sequence[DraftTree]) -> None:
    """Let constraints compute the masks of all drafted nodes beside the target's pass."""
    for item, tree in zip(schedule.items, trees, strict=True):
        if item.request.constraint is not None and item.completes:
            prepare_masks(item.request.constraint, tree)


def draft_bounds(context: StepContext, request: Request, certain: bool = False) -> DraftBounds:
    """Return what bounds a sequence's draft, by what its drafter announces, unless its tokens are certain."""
    needs, longest = context.drafters.needs(request), context.limits.max_model_len
    if needs is None:
        return NO_DRAFT
    if certain:
        return DraftBounds(longest)
    most = min(longest, needs.max_positions or longest)
    return DraftBounds(most, needs.max_nodes, needs.nodes_per_beam or 0, needs.target_inputs)


def commit_sequence(
    context: StepContext, output: TargetOutput, verdict: Verdict | Beams | SpeculantError | None, timing: StepTiming
) -> Committed:
    """Commit one sequence's share of a step; a failure ends that request and no other."""
    request = output.item.request
    num_output = request.num_output
    if request.stop_checker is not None:
        request.stop_checker.checkpoint()
    try:
        request.metrics.timing.record_pass(timing)
        if isinstance(verdict, SpeculantError):
            raise verdict
        if output.prompt_hidden is not None:
            record_prompt(request, output.prompt_hidden, context.target)
        committed = Committed(request, [], [])
        if isinstance(verdict, Beams):
            committed = commit_beams(output, verdict, context.cache, timing.verified)
        elif verdict is not None:
            committed = commit(output, verdict, context.cache, context.limits.max_model_len, timing.verified)
        context.cache.insert_prefix(request.seq_id, request.tokens)
    except Exception as error:  # noqa: BLE001 - no error may affect the other requests
        roll_back(request, num_output)
        return fail(request, error)
    notify(context.drafters, output, committed)
    return committed


def notify(drafters: Drafters, output: TargetOutput, committed: Committed) -> None:
    """Tell a drafter what is committed of a pass. A text that does not continue the one before begins anew."""
    if committed.left:
        drafters.end(output.item.request)
    else:
        drafters.observe(output.item.request, partial(committed_rows, output, committed))


def committed_rows(output: TargetOutput, committed: Committed) -> CommittedRows:
    """Return the rows of a pass that were committed."""
    item, tree = output.item, output.tree
    kept, tokens, hidden = committed.kept, item.tokens, output.hidden
    if tree.size:
        tokens = [*tokens, *[tree.token_list[node] for node in kept]]
        if not hidden or tuple(kept) == tuple(range(len(kept))):
            hidden = state_rows(hidden, 0, len(tokens))
        else:
            rows = [*range(item.count), *[item.count + node for node in kept]]
            hidden = tuple(states[rows] for states in hidden)
    ahead = None if output.ahead is None else output.ahead[1 + kept[-1] if kept else 0]
    return CommittedRows(item.start, tokens, committed.tokens, hidden, output.successors, ahead)


def take_back(cache: KVCache, scheduled: Sequence[Scheduled]) -> None:
    """Take back what a failed step reserved, so that the other sequences' next step starts where this one did."""
    for item in scheduled:
        if cache.length(item.request.seq_id) > item.start:
            cache.truncate_to(item.request.seq_id, item.start)


def verify(
    context: StepContext, ready: Sequence[TargetOutput], logits: Tensor
) -> dict[int, Verdict | Beams | SpeculantError]:
    """Make the target's distributions for all sequences at once, then verify each draft; return verdicts by sequence.

    logits: those of all these sequences, in order. The verdict of a beam search is the advanced search; a sequence
    whose next token has no distribution gets an error.
    """
    if not ready:
        return {}
    verifiers = [verifier_for(context.verifiers[each.item.request.verifier], each.item.request) for each in ready]
    nodes = [node for output, verifier in zip(ready, verifiers, strict=True) for node in _nodes(output, verifier)]
    probs = distribution(logits, nodes, context.sampler)
    maxima = row_maxima(probs)
    verdicts, first = dict[int, Verdict | Beams | SpeculantError](), 0
    for output, verifier in zip(ready, verifiers, strict=True):
        end, request = first + len(output.nodes), output.item.request
        own = probs if len(ready) == 1 else probs[first:end]
        verdicts[request.seq_id] = _verdict(output, verifier, own, maxima[first:end], context.chances)
        first = end
    return verdicts


def _nodes(output: TargetOutput, verifier: Verifier) -> list[Node]:
    request, tree = output.item.request, output.tree
    if request.constraint is None and not request.params.edits:  # the drafted tokens before a row change nothing
        return [Node(request, (), verifier.needs.softened)] * len(output.nodes)
    return [Node(request, tree.tokens_to(node), verifier.needs.softened) for node in output.nodes]


def _verdict(
    output: TargetOutput, verifier: Verifier, probs: Tensor, maxima: Sequence[float], chances: Chances
) -> Verdict | Beams | SpeculantError:
    request, tree = output.item.request, output.tree
    if request.search is not None:
        return advance_sound(request.search.beams, tree, output.nodes, probs, maxima)
    failure = failure_of(maxima[0])
    if failure is not None:
        return failure
    return verify_sound(verifier, tree, probs, maxima, chances.verify(request))
