"""One step of the engine, which is the whole algorithm: draft, verify in one target pass, commit.

The encoder of an encoder-decoder model reads new sources first. Drafts are the tokens that a constraint forces, else
the proposal of a drafter, within a limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from speculant.cache import KVCache, Source
from speculant.config import Limits
from speculant.constraints import forced_tokens, prepare_masks
from speculant.drafting import DrafterNeeds, Drafters
from speculant.engine.commit import Committed, commit_measured, commit_output, notify
from speculant.engine.profiling import ENCODE, Mark, unmarked
from speculant.engine.runner import forward_target, verify, with_successors
from speculant.kernels import REFERENCE, Sampler
from speculant.lengths import DraftOutcome, GuardedLength, num_rows
from speculant.metrics import StepTiming
from speculant.models import CausalLM, encode_sources
from speculant.params import MAX_SPECULATIVE_TOKENS
from speculant.sampling import Chances
from speculant.scheduling import Schedule, Scheduled
from speculant.types import NO_WORK, DraftTree, Request
from speculant.verification import Verifiers

logger = logging.getLogger(__name__)

MOST_PROBS_BYTES = 2**28  # of the distributions after all draft nodes of a step
FORCED = DrafterNeeds()  # of a draft of forced tokens, for which no drafter is asked


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
                encode_sources(target, cache, [each.source for each in schedule.sources], drafters.needs.reads.encoder)
            encoded = time.perf_counter()
        with mark("draft"):
            drafts = propose(schedule, drafters, length, max_model_len, target)
        drafted = time.perf_counter()
        with mark("target pass"):
            trees = map(attrgetter("tree"), drafts)
            outputs, logits = forward_target(target, cache, schedule.items, trees, drafters.needs.hidden_layers)
            if drafters.needs.reads.top_k:
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
            commit = commit_output if request.work is NO_WORK else commit_measured
            committed.append(commit(output, decisions.get(request.seq_id), timing, target, cache, max_model_len))
        if drafting:
            notify(drafters, outputs, committed)
    if drafting and length.observes and drafts and not length.paused:
        outcomes = list[DraftOutcome]()
        for draft, each in zip(drafts, committed, strict=True):
            if (outcome := draft.observed(each.outcome)) is not None:
                outcomes.append(outcome)
        timing.rest_s = time.perf_counter() - timing.verified
        length.observe(outcomes, timing)
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
        return DraftOutcome(self.item.request, (), (), (), (), self.tree.num_rows - self.tree.size, self.missing)


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
            budget, restart_at = DraftBudget(schedule, MOST_PROBS_BYTES // (8 * vocab_size)), target.needs.restart_at
            longest = MAX_SPECULATIVE_TOKENS if target.needs.most_nodes is None else target.needs.most_nodes
            for draft, length in zip(drafts, lengths, strict=True):
                request, most = draft.item.request, max_model_len
                if restart_at is not None and not target.needs.is_long(request.num_positions):
                    most = min(most, restart_at + 1)  # no draft has a row that the target computes in another way
                if draft.forced:
                    draft.limit = budget.take(draft.item, min(len(draft.forced), longest), FORCED, most)
                elif (needs := drafters.needs_by_method.get(request.drafts.method)) is not None:
                    draft.limit = budget.take(draft.item, min(length, longest), needs, most)
            _fill(drafts, requests, drafters, draft_length)
            if target.needs.most_nodes is not None:
                for draft in drafts:
                    draft.tree = draft.tree.first_path(longest)
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
        if draft.limit and made.num_rows:
            draft.tree = made


class DraftBudget:
    """The rows of token budget and cache, and the time for work, that a step's drafts may use after its tokens.

    Drafts take rows in order and never cause preemption. All together have at most `most_nodes` nodes.
    """

    def __init__(self, schedule: Schedule, most_nodes: int) -> None:
        self._left, self._plan, self._work = min(schedule.spare_tokens, most_nodes), schedule.plan, schedule.work

    def take(self, item: Scheduled, length: int, needs: DrafterNeeds, max_len: int) -> int:
        """Take the rows of a draft of the wanted length; return how many nodes it may have.

        A draft of n nodes commits at most n + 1 tokens, so it never passes max_tokens, nor the longest sequence that
        target (`max_len`) and drafter can hold. Look-ahead rows take budget and memory as nodes do. In a beam search a
        length counts rounds of `nodes_per_beam` nodes per beam. The nodes follow all live hypotheses, including those
        that the step would otherwise not compute.
        """
        if length <= 0 or not item.decodes:
            return 0
        request, search, ahead = item.request, item.request.search, needs.target_inputs
        max_len, max_tokens = min(max_len, needs.max_positions or max_len), request.params.max_tokens
        num_positions = request.num_positions
        left = max_len - num_positions - 1
        if max_tokens is not None:
            left = min(left, max_tokens - (num_positions - len(request.prompt)) - 1)
        nodes, least = min(length, left), 1
        if search is not None:
            least = search.beams.width * (needs.nodes_per_beam or 0)  # part of a round takes the work of a whole one
            nodes *= least
        elif needs.max_nodes is not None:
            nodes = min(nodes, needs.max_nodes)
        if ahead:
            nodes = nodes_within(max_len - num_positions - 1, nodes, ahead)
        if nodes <= 0:
            return 0
        if self._work is not None:
            drafting_s = 0.0 if search is None else request.work.drafts.row_s
            nodes = self._work.take(request.sender.client.name, request.work, nodes, least, drafting_s) // least * least
            if not nodes:
                return 0
        uncomputed = 0 if search is None else search.beams.live_tree.size - item.tree.size
        taken = uncomputed + (num_rows(nodes, ahead) if ahead else nodes)
        if taken > self._left or not self._plan.take(request.seq_id, taken):
            nodes = nodes_within(min(self._left, self._plan.room(request.seq_id)) - uncomputed, nodes, ahead)
            taken = num_rows(nodes, ahead) + uncomputed if nodes else 0
            self._plan.take(request.seq_id, taken)
        self._left -= taken
        return nodes


def nodes_within(rows: int, nodes: int, look_ahead_rows: int) -> int:
    """Return how many of these nodes fit into a number of rows, with up to `look_ahead_rows` below each of them."""
    nodes = max(0, min(nodes, rows))
    while nodes and num_rows(nodes, look_ahead_rows) > rows:
        nodes -= 1
    return nodes
