"""One step of the engine, which is the whole algorithm: draft, verify in one target pass, commit.

The encoder of an encoder-decoder model reads new sources first. Drafts are the tokens that a constraint forces, else
the proposal of a drafter, within a limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import torch

from speculant.cache import KVCache, Source
from speculant.config import Limits
from speculant.constraints import forced_tokens, prepare_masks
from speculant.drafting import Drafters
from speculant.engine.commit import Committed, commit_output, notify
from speculant.engine.profiling import ENCODE, Mark, unmarked
from speculant.engine.runner import forward_target, verify, with_successors
from speculant.kernels import REFERENCE, Sampler
from speculant.lengths import DraftOutcome, GuardedLength, num_rows
from speculant.metrics import StepTiming
from speculant.models import CausalLM, ModelNeeds, encode_sources
from speculant.params import MAX_SPECULATIVE_TOKENS
from speculant.sampling import Chances
from speculant.scheduling import Schedule, Scheduled
from speculant.types import NO_WORK, DraftTree, Request
from speculant.verification import Verifiers

logger = logging.getLogger(__name__)

MOST_PROBS_BYTES = 2**28  # of the distributions after all draft nodes of a step


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
                encode_sources(target, cache, [each.source for each in schedule.sources], drafters.needs.target.encoder)
            encoded = time.perf_counter()
        with mark("draft"):
            drafts = propose(schedule, drafters, length, max_model_len, target)
        drafted = time.perf_counter()
        with mark("target pass"):
            trees = map(attrgetter("tree"), drafts)
            outputs, logits = forward_target(target, cache, schedule.items, trees, drafters.needs.target.hidden_layers)
            if drafters.needs.target.top_k:
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
        outcomes = list[DraftOutcome]()
        for draft, each in zip(drafts, committed, strict=True):
            if (outcome := draft.observed(each.outcome)) is not None:
                outcomes.append(outcome)
        length.observe(outcomes, replace(timing, committed=time.perf_counter()))
    return committed, timing


@dataclass(slots=True)
class SequenceDraft:
    """The nodes that a pass computes after one sequence's newest token.

    tree: the draft; without one, the live hypotheses of a beam search. forced: tokens that a constraint forces next.
    They are accepted for certain and replace the drafter's proposal. limit: the most nodes of a draft. missing: those
    that the drafter was asked for and did not return.
    """

    item: Scheduled
    tree: DraftTree
    forced: Sequence[int] = ()
    limit: int = 0
    missing: int = 0

    def observed(self, outcome: DraftOutcome | None) -> DraftOutcome | None:
        """Return an outcome as the policy observes it; None = nothing was drafted. Beam searches have none."""
        if outcome is not None:
            changed = self.missing or self.forced
            return outcome._replace(missing=self.missing, forced=bool(self.forced)) if changed else outcome
        if not self.missing or self.missing < self.limit or self.item.request.search is not None:
            return None
        return DraftOutcome(self.item.request, (), (), (), (), self.tree.num_look_ahead_rows, self.missing)


def propose(
    schedule: Schedule, drafters: Drafters, draft_length: GuardedLength, max_model_len: int, target: CausalLM
) -> list[SequenceDraft]:
    """Return a draft for each item of a schedule; its tree is empty where nothing is drafted."""
    vocab_size, forces = target.vocab_size, False
    drafts, constrained = list[SequenceDraft](), list[SequenceDraft]()
    requests, sources = list[Request](), list[Source | None]()
    for item in schedule.items:
        drafts.append(SequenceDraft(item, item.tree))
        requests.append(item.request)
        sources.append(item.source)
        if item.request.constraint is not None:
            drafts[-1].forced = _forced(item, vocab_size)
            forces = forces or len(drafts[-1].forced) > 0
            constrained.append(drafts[-1])
    drafting = len(drafters.guarded) > 0 and len(drafts) > 0
    lengths = draft_length.choose(schedule) if drafting else None
    if lengths is not None or (drafting and forces):
        drafters.begin_all(zip(requests, sources, strict=True))
        lengths = lengths or [0] * len(drafts)
        if any(lengths) or forces or draft_length.keeps_up:
            budget = DraftBudget(schedule, MOST_PROBS_BYTES // (8 * vocab_size))
            for draft, length in zip(drafts, lengths, strict=True):
                bounds = _bounds(drafters, draft, longest_draft(draft.item.request, max_model_len, target.needs))
                draft.limit = budget.take(draft.item, len(draft.forced) or length, bounds)
            _fill(drafts, requests, drafters, draft_length)
    for draft in constrained:
        if draft.item.completes:
            with draft.item.request.work:
                prepare_masks(draft.item.request.constraint, draft.tree)  # computed while the target's pass runs
    return drafts


def _forced(item: Scheduled, vocab_size: int) -> Sequence[int]:
    """Return the tokens that a constraint forces next, if the sequence may have a draft."""
    request = item.request
    if request.drafts.method is None or request.drafts.num_tokens == 0 or not item.decodes:
        return ()
    with request.work:
        return forced_tokens(request.constraint, vocab_size)[:MAX_SPECULATIVE_TOKENS]


def _fill(
    drafts: Sequence[SequenceDraft],
    requests: Sequence[Request],
    drafters: Drafters,
    draft_length: GuardedLength,
) -> None:
    """Set the tree of each draft that has a limit, unless its drafter proposes nothing."""
    limits, silent = list[int](), list[Request]()
    for draft in drafts:
        limit = 0 if draft.forced else draft.limit
        limits.append(limit)
        if not limit:
            silent.append(draft.item.request)
    proposed = drafters.propose(requests, limits, draft_length.policy)
    trees = draft_length.trim(requests, proposed)
    if draft_length.keeps_up:
        drafters.catch_up(silent)
    for draft, limit, whole, tree in zip(drafts, limits, proposed, trees, strict=True):
        draft.missing = max(0, limit - whole.size)
        made = DraftTree.chain(list(draft.forced[: draft.limit])) if draft.forced else tree
        if draft.limit and (made.size or made.ahead is not None):
            draft.tree = made


class DraftBounds(NamedTuple):
    """Bounds of one sequence's draft in addition to budget and memory.

    max_len: the longest sequence that target and drafter can hold. max_nodes: the drafter's own limit; None = none.
    nodes_per_beam: nodes that it drafts per beam and round of a beam search; 0 = beam searches get no drafts.
    look_ahead_rows: the most of them below the root and below each node; there are at most as many below each as the
    draft has nodes.
    """

    max_len: int
    max_nodes: int | None = None
    nodes_per_beam: int = 0
    look_ahead_rows: int = 0

    def within(self, nodes: int, rows: int) -> int:
        """Return how many of these nodes fit into a number of rows, with the look-ahead rows."""
        nodes = max(0, min(nodes, rows))
        while nodes and num_rows(nodes, self.look_ahead_rows) > rows:
            nodes -= 1
        return nodes


def longest_draft(request: Request, max_model_len: int, needs: ModelNeeds) -> int:
    """Return the longest text that a draft and the token after it may make.

    No row of a draft is beyond the length at which the target computes all tokens in another way.
    """
    at = needs.restart_at
    return max_model_len if at is None or needs.is_long(request.num_positions) else min(max_model_len, at + 1)


def _bounds(drafters: Drafters, draft: SequenceDraft, max_model_len: int) -> DraftBounds:
    """Return the bounds of a draft, as its drafter announces them; forced tokens need no drafter."""
    needs = drafters.needs_of(draft.item.request.drafts.method)
    if needs is None:
        return DraftBounds(max_len=0)
    if draft.forced:
        return DraftBounds(max_model_len)
    longest = min(max_model_len, needs.max_positions or max_model_len)
    return DraftBounds(longest, needs.max_nodes, needs.nodes_per_beam or 0, needs.target.inputs)


class DraftBudget:
    """The rows of token budget and cache, and the time for work, that a step's drafts may use after its tokens.

    Drafts take rows in order and never cause preemption. All together have at most `most_nodes` nodes.
    """

    def __init__(self, schedule: Schedule, most_nodes: int) -> None:
        self._left, self._plan, self._work = min(schedule.spare_tokens, most_nodes), schedule.plan, schedule.work

    def take(self, item: Scheduled, length: int, bounds: DraftBounds) -> int:
        """Take the rows of a draft of the wanted length; return how many nodes it may have.

        A draft of n nodes commits at most n + 1 tokens, so it never passes max_tokens or max_len. Look-ahead rows take
        budget and memory as nodes do. In a beam search a length counts rounds of nodes_per_beam nodes per beam. The
        nodes follow all live hypotheses, including those that the step would otherwise not compute.
        """
        request, search = item.request, item.request.search
        nodes, least = min(length, room(request, bounds.max_len)), 1
        if search is not None:
            least = search.beams.width * bounds.nodes_per_beam  # the work of a round is that of a whole one
            nodes *= least
        elif bounds.max_nodes is not None:
            nodes = min(nodes, bounds.max_nodes)
        if bounds.look_ahead_rows:
            nodes = bounds.within(nodes, bounds.max_len - request.num_positions - 1)
        if nodes <= 0 or not item.decodes:
            return 0
        if self._work is not None:
            drafting_s = 0.0 if search is None else request.work.drafts.row_s
            nodes = self._work.take(request.sender.client.name, request.work, nodes, least, drafting_s) // least * least
            if not nodes:
                return 0
        uncomputed = 0 if search is None else search.beams.live_tree.size - item.tree.size
        taken = uncomputed + (num_rows(nodes, bounds.look_ahead_rows) if bounds.look_ahead_rows else nodes)
        if taken > self._left or not self._plan.take(request.seq_id, taken):
            nodes = bounds.within(nodes, min(self._left, self._plan.room(request.seq_id)) - uncomputed)
            taken = num_rows(nodes, bounds.look_ahead_rows) + uncomputed if nodes else 0
            self._plan.take(request.seq_id, taken)
        self._left -= taken
        return nodes


def room(request: Request, max_len: int) -> int:
    """Return the longest chain whose acceptance and one more token stay within max_tokens and max_len."""
    num_positions, max_tokens = request.num_positions, request.params.max_tokens
    left = max_len - num_positions - 1
    return left if max_tokens is None else min(left, max_tokens - (num_positions - len(request.prompt)) - 1)
