"""A draft-length policy whose errors cost drafts and fail no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from operator import index

from speculant.errors import DraftLengthError, Guard
from speculant.lengths.base import DraftLength, DraftOutcome, ScoredDraft
from speculant.metrics import StepTiming
from speculant.scheduling.scheduler import Schedule
from speculant.types import DraftTree, Request

logger = logging.getLogger(__name__)


class GuardedLength:
    """A policy that is checked: after an error, or for lengths that break its contract, the step has no drafts."""

    def __init__(self, policy: DraftLength) -> None:
        self._policy, self.keeps_up = policy, bool(getattr(policy, "keeps_up", False))
        self._guard = Guard(logger, "and the step goes on without drafts")
        self._pause: Callable[[], int] | None = None if self.keeps_up else getattr(policy, "pause", None)
        self.paused = False  # in this step
        self._left, self._spare = 0, 0  # steps of the pause, and the spare tokens of each: the same rows are scheduled

    def choose(self, schedule: Schedule) -> list[int]:
        """Ask the policy for the draft length of each item."""
        wishes: list[int] = []
        if self._guard.succeeds("the draft length policy", partial(self._choose, schedule, wishes)):
            return wishes
        return [0] * len(schedule.items)

    def pauses(self, schedule: Schedule) -> bool:
        """Whether the policy is paused in this step, which then has no drafts: see `PausingLength`."""
        goes_on = self._spare == schedule.spare_tokens and not (schedule.admitted or schedule.preempted)
        self.paused = self._left > 0 and goes_on
        self._left = self._left - 1 if self.paused else 0
        return self.paused

    def trim(self, requests: Sequence[Request], drafts: Sequence[DraftTree]) -> list[DraftTree]:
        """Cut the deterministic drafts that have scores; whatever the policy does wrong keeps them whole.

        Drafts of a beam search stay whole: they begin with its live hypotheses, which the step has to compute.
        """
        choose = getattr(self._policy, "trim", None)
        places = [place for place, draft in enumerate(drafts) if draft.scores is not None and draft.probs is None]
        places = [place for place in places if requests[place].search is None]
        if choose is None or not places:
            return list(drafts)
        seen = [ScoredDraft(requests[place], drafts[place].scores or (), drafts[place].parent_list) for place in places]
        counts: list[int] = []
        self._guard.succeeds("the draft length policy", lambda: counts.extend(map(index, choose(seen))))
        cut = list(drafts)
        for place, count in zip(places, counts, strict=False):
            cut[place] = drafts[place].first(max(0, count))
        return cut

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Tell the policy what became of the drafts; the step is committed by now."""
        self._guard.succeeds("the draft length policy", partial(self._policy.observe, outcomes, timing))

    def _choose(self, schedule: Schedule, wishes: list[int]) -> None:
        """Extend `wishes` by the policy's choice, checked."""
        chosen, count = list(map(index, self._policy.choose(schedule))), len(schedule.items)
        if len(chosen) != count or (chosen and min(chosen) < 0):
            raise DraftLengthError(f"the lengths are {chosen!r} for {count} sequences", "give one from 0 up for each.")
        if self._pause is not None and not any(chosen):
            self._left, self._spare = index(self._pause()), schedule.spare_tokens
        wishes += chosen
