"""One step of the engine, which is the whole algorithm: draft, check in one pass, keep what stands."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.engine.commit import Committed, commit, record_prompt
from speculant.engine.runner import Fed, run_target
from speculant.models.base import CausalLM
from speculant.sampling.chance import Chances
from speculant.sampling.distribution import Node, distribution
from speculant.scheduling.draft_length import DraftLength, draft_limits
from speculant.scheduling.scheduler import Scheduled, Scheduler
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier


@dataclass(frozen=True)
class Parts:
    """What a step works with. `drafter` None = no speculation; `rules` by name."""

    limits: Limits
    scheduler: Scheduler
    target: CausalLM
    cache: KVCache
    drafter: Drafter | None
    draft_length: DraftLength
    rules: dict[str, Verifier]
    chances: Chances


@dataclass(frozen=True)
class StepResult:
    """What was committed, and where the time went, in seconds."""

    committed: list[Committed]
    draft_s: float
    verify_s: float


@torch.inference_mode()
def step(parts: Parts) -> StepResult:
    """Feed every scheduled sequence once and commit what the target agrees to."""
    scheduled = parts.scheduler.schedule(parts.cache)
    started = time.perf_counter()
    trees = propose(parts, scheduled)
    drafted = time.perf_counter()
    with undone_on_error(parts.cache, scheduled):
        fed = run_target(parts.target, parts.cache, scheduled, trees)
        ready = [item for item in fed if item.logits is not None]
        verdicts = verify(parts, ready)
    verified = time.perf_counter()
    record_prompt_logprobs(fed)
    for item in scheduled:
        item.request.metrics.timing.record_pass(drafted - started, verified - drafted)
    committed = [
        commit(item, verdict, parts.cache, parts.limits.max_model_len, verified)
        for item, verdict in zip(ready, verdicts, strict=True)
    ]
    if parts.drafter is not None:
        for each in committed:
            parts.drafter.observe(each.request, each.tokens)
    return StepResult(committed, drafted - started, verified - drafted)


def propose(parts: Parts, scheduled: Sequence[Scheduled]) -> list[DraftTree]:
    """Ask the drafter for a tree per sequence, within each one's limit."""
    if parts.drafter is None:
        return [DraftTree.empty()] * len(scheduled)
    budget = parts.scheduler.draft_budget(scheduled)
    needs = parts.drafter.needs
    max_len = min(parts.limits.max_model_len, needs.max_positions or parts.limits.max_model_len)
    limits = draft_limits(scheduled, parts.draft_length, budget, needs.max_nodes, max_len)
    return parts.drafter.propose([item.request for item in scheduled], limits)


@contextmanager
def undone_on_error(cache: KVCache, scheduled: Sequence[Scheduled]) -> Iterator[None]:
    """Take back what a failed pass reserved, so that the other sequences' next step starts where this one did."""
    try:
        yield
    except BaseException:
        for item in scheduled:
            if cache.length(item.request.seq) > item.start:
                cache.truncate_to(item.request.seq, item.start)
        raise


def verify(parts: Parts, ready: Sequence[Fed]) -> list[Verdict]:
    """Make the target's laws for all sequences at once, then let each one's rule decide."""
    if not ready:
        return []
    nodes = [Node(fed.item.request, fed.tree.tokens_to(i)) for fed in ready for i in range(-1, fed.tree.size)]
    laws = distribution(torch.cat([fed.logits for fed in ready if fed.logits is not None]), nodes)
    verdicts, first = [], 0
    for fed in ready:
        end = first + fed.tree.size + 1
        verdicts.append(_verdict(parts, fed, laws[first:end]))
        first = end
    return verdicts


def _verdict(parts: Parts, fed: Fed, laws: Tensor) -> Verdict:
    request = fed.item.request
    return parts.rules[request.rule].verify(fed.tree, laws, parts.chances.verify(request))


def record_prompt_logprobs(fed: Sequence[Fed]) -> None:
    """Note the prompt's log-probabilities where they were asked for."""
    for item in fed:
        if item.prompt_logits is not None:
            record_prompt(item.item, item.prompt_logits)
