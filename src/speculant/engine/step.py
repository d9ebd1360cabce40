"""One step of the engine, which is the whole algorithm: draft, check in one pass, keep what stands."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.beams import Beams
from speculant.cache.base import KVCache
from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.engine.commit import Committed, commit, commit_beams, fail, record_prompt, roll_back
from speculant.engine.profiling import Mark, unmarked
from speculant.engine.runner import TargetOutput, forward_target
from speculant.kernels.native import Kernels
from speculant.models.base import CausalLM
from speculant.sampling.chance import Chances
from speculant.sampling.distribution import Node, distribution
from speculant.sampling.ranking import rank
from speculant.scheduling.draft_length import DraftLength, draft_limits
from speculant.scheduling.scheduler import Schedule, Scheduled
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, verifier_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepContext:
    """What a step works with. `drafter` None = no speculation; `rules` by name; `kernels` make the distributions."""

    limits: Limits
    target: CausalLM
    cache: KVCache
    drafter: Drafter | None
    draft_length: DraftLength
    verifiers: dict[str, Verifier]
    chances: Chances
    kernels: Kernels | None = None


@dataclass(frozen=True)
class Timing:
    """Where a step's time went: in seconds, by `time.perf_counter`."""

    started: float
    drafted: float
    verified: float

    @property
    def draft_s(self) -> float:
        """Time to propose."""
        return self.drafted - self.started

    @property
    def verify_s(self) -> float:
        """Time of the target's pass and the verdicts."""
        return self.verified - self.drafted


@torch.inference_mode()
def step(context: StepContext, schedule: Schedule, mark: Mark = unmarked) -> tuple[list[Committed], Timing]:
    """Feed every scheduled sequence once and commit what the target agrees to.

    An error before the first commit leaves every request and the cache as they were. `mark` shows the phases
    to a profiler.
    """
    started = time.perf_counter()
    with rolled_back_on_error(context.cache, schedule.items):
        with mark("draft"):
            trees = propose(context, schedule)
        drafted = time.perf_counter()
        with mark("target pass"):
            fed = forward_target(context.target, context.cache, schedule.items, trees)
        with mark("verify"):
            verdicts = verify(context, [each for each in fed if each.logits is not None])
    timing = Timing(started, drafted, time.perf_counter())
    with mark("commit"):
        return [commit_sequence(context, each, verdicts.get(each.item.request.seq_id), timing) for each in fed], timing


def propose(context: StepContext, schedule: Schedule) -> list[DraftTree]:
    """Ask the drafter for a tree per sequence, within each one's limit; a beam search has one without it."""
    if context.drafter is None:
        return [item.tree for item in schedule.items]
    needs, longest = context.drafter.needs, context.limits.max_model_len
    longest = min(longest, needs.max_positions or longest)
    limits = draft_limits(schedule, context.draft_length, needs.max_nodes, longest, needs.nodes_per_beam)
    drafts = context.drafter.propose([item.request for item in schedule.items], limits)
    return [draft if draft.size else item.tree for item, draft in zip(schedule.items, drafts, strict=True)]


def commit_sequence(
    context: StepContext, fed: TargetOutput, verdict: Verdict | Beams | None, timing: Timing
) -> Committed:
    """Commit one sequence's share of a step; a failure ends that request and no other."""
    request = fed.item.request
    num_output = request.num_output
    try:
        request.metrics.timing.record_pass(timing.draft_s, timing.verify_s)
        if fed.prompt_logits is not None:
            record_prompt(request, fed.prompt_logits)
        committed = Committed(request, [], [])
        if isinstance(verdict, Beams):
            committed = commit_beams(fed, verdict, context.cache, timing.verified)
        elif verdict is not None:
            committed = commit(fed, verdict, context.cache, context.limits.max_model_len, timing.verified)
        context.cache.insert_prefix(request.seq_id, request.tokens)
        if context.drafter is not None:
            tell(context.drafter, committed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not harm the neighbours
        roll_back(request, num_output)
        return fail(request, error)
    return committed


def tell(drafter: Drafter, committed: Committed) -> None:
    """Let the drafter hear of new tokens; a text that does not go on from the one before begins anew."""
    if committed.tokens:
        drafter.observe(committed.request, committed.tokens)
    elif committed.left and not committed.request.finished:
        drafter.end(committed.request)
        drafter.begin(committed.request)


@contextmanager
def rolled_back_on_error(cache: KVCache, scheduled: Sequence[Scheduled]) -> Iterator[None]:
    """Take back what a failed step reserved, so that the other sequences' next step starts where this one did."""
    try:
        yield
    except BaseException as error:
        logger.info("a step of %d sequences failed and is rolled back: %r", len(scheduled), error)
        for item in scheduled:
            if cache.length(item.request.seq_id) > item.start:
                cache.truncate_to(item.request.seq_id, item.start)
        raise


def verify(context: StepContext, ready: Sequence[TargetOutput]) -> dict[int, Verdict | Beams]:
    """Make the target's distributions for all sequences at once, then let each one's rule decide; verdicts by sequence.

    That of a beam search is what becomes of it.
    """
    if not ready:
        return {}
    nodes = [node for fed in ready for node in _nodes(fed, _verifier(context, fed))]
    probs = distribution(torch.cat([fed.logits for fed in ready if fed.logits is not None]), nodes, context.kernels)
    verdicts, first = dict[int, Verdict | Beams](), 0
    for fed in ready:
        end = first + fed.tree.size + 1
        verdicts[fed.item.request.seq_id] = _verdict(context, fed, probs[first:end])
        first = end
    return verdicts


def _verifier(context: StepContext, fed: TargetOutput) -> Verifier:
    return verifier_for(context.verifiers[fed.item.request.verifier], fed.item.request)


def _nodes(fed: TargetOutput, verifier: Verifier) -> list[Node]:
    request, tree = fed.item.request, fed.tree
    return [Node(request, tree.tokens_to(node), verifier.needs.softened) for node in range(-1, tree.size)]


def _verdict(context: StepContext, fed: TargetOutput, probs: Tensor) -> Verdict | Beams:
    request, tree = fed.item.request, fed.tree
    if request.beams is not None:
        texts = [(*request.output, *tree.tokens_to(node)) for node in range(-1, tree.size)]
        return request.beams.advance(dict(zip(texts, rank(probs, request.beams.num_continuations), strict=True)))
    return _verifier(context, fed).verify(tree, probs, context.chances.verify(request))
