"""One step of the engine, which is the whole algorithm: draft, verify in one target pass, commit.

The encoder of an encoder-decoder model reads new sources first.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from speculant.cache import KVCache
from speculant.config import Limits
from speculant.drafting import Drafters
from speculant.engine.commit import Committed, commit_output, notify
from speculant.engine.profiling import ENCODE, Mark, unmarked
from speculant.engine.propose import propose
from speculant.engine.runner import forward_target, with_successors
from speculant.engine.verify import verify
from speculant.kernels import REFERENCE, Sampler
from speculant.lengths import GuardedLength
from speculant.metrics import StepTiming
from speculant.models import CausalLM, encode_sources
from speculant.sampling import Chances
from speculant.scheduling import Schedule
from speculant.types import NO_WORK
from speculant.verification import Verifiers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepContext:
    """The parts that a step uses. verifiers: see `checked_verifiers`. sampler: makes the distributions."""

    limits: Limits
    target: CausalLM
    cache: KVCache
    drafters: Drafters
    draft_length: GuardedLength
    verifiers: Verifiers
    chances: Chances
    sampler: Sampler = REFERENCE


@torch.inference_mode()
def step(context: StepContext, schedule: Schedule, mark: Mark = unmarked) -> tuple[list[Committed], StepTiming]:
    """Compute every scheduled sequence once and commit the tokens of its verdict.

    An error before the first commit leaves every request and the cache as they were. `mark` shows the phases
    to a profiler.
    """
    target, cache, drafters, length = context.target, context.cache, context.drafters, context.draft_length
    max_model_len, drafting = context.limits.max_model_len, len(drafters.guarded) > 0
    started, encoded = time.perf_counter(), None
    try:
        if schedule.sources:
            with mark(ENCODE):
                encode_sources(target, cache, [each.source for each in schedule.sources], drafters.needs.reads_encoder)
            encoded = time.perf_counter()
        with mark("draft"):
            drafts = propose(schedule, drafters, length, max_model_len, target)
        drafted = time.perf_counter()
        with mark("target pass"):
            trees = map(attrgetter("tree"), drafts)
            outputs, logits = forward_target(target, cache, schedule.items, trees, drafters.needs.hidden_layers)
            if drafters.needs.target_top_k:
                outputs = with_successors(outputs, drafters.target_top_k)
        passed = time.perf_counter()
        with mark("verify"):
            decisions = verify(outputs, logits, context.verifiers, context.chances, context.sampler)
    except BaseException as error:
        logger.info("a step of %d sequences failed and is rolled back: %r", len(schedule.items), error)
        schedule.roll_back(cache)
        raise
    timing = StepTiming(started, drafted, time.perf_counter(), passed=passed, encoded=encoded)
    committed = list[Committed]()
    with mark("commit"):
        for output in outputs:
            request = output.item.request
            with request.work:
                decision = decisions.get(request.seq_id)
                committed.append(commit_output(output, decision, timing, target, cache, max_model_len))
            if request.work is not NO_WORK:
                request.work.settle(output.num_results)
        if drafting:
            notify(drafters, outputs, committed)
    if drafting and drafts and not length.paused:
        outcomes = [draft.observed(each.outcome) for draft, each in zip(drafts, committed, strict=True)]
        length.observe([*filter(None, outcomes)], replace(timing, committed=time.perf_counter()))
    return committed, timing
