"""A draft-length policy whose errors cost drafts and fail no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import index

from speculant.engine.measuring import Measurement
from speculant.errors import DraftLengthError, Guard
from speculant.lengths import DraftLength, DraftOutcome, ScoredDraft
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from speculant.types import DraftTree, Request

logger = logging.getLogger(__name__)
_NAME = "the draft length policy"


class GuardedLength:
    """A policy that is checked: after an error, or for lengths that break its contract, the step has no drafts.

    measurement: of the costs that the policy compares. Until it ends, the policy is not called, and nothing is drafted.
    """

    def __init__(self, policy: DraftLength, measurement: Measurement | None = None) -> None:
        self._policy, self.keeps_up = policy, bool(getattr(policy, "keeps_up", False))
        self._measurement = measurement or Measurement()
        self._guard = Guard(logger, "and the step goes on without drafts")
        self._pause: Callable[[], int] | None = None if self.keeps_up else getattr(policy, "pause", None)
        self._trim: Callable[[Sequence[ScoredDraft]], list[int]] | None = getattr(policy, "trim", None)
        self.paused = False  # in this step
        self._left, self._spare = 0, 0  # steps of the pause, and the spare tokens of each: the same rows are scheduled

    def choose(self, schedule: Schedule) -> list[int]:
        """Return the policy's draft length for each item."""
        count, self.paused = len(schedule.items), self._measurement.active
        if self.paused:
            return [0] * count
        try:
            lengths = list(map(index, self._policy.choose(schedule)))
            if len(lengths) != count or (lengths and min(lengths) < 0):
                raise DraftLengthError(f"the lengths are {lengths!r} for {count} sequences", "give each one from 0 up.")
            if self._pause is not None and not any(lengths):
                self._left, self._spare = index(self._pause()), schedule.spare_tokens
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self._guard.note(_NAME, error)
            return [0] * count
        return lengths

    def pauses(self, schedule: Schedule) -> bool:
        """Whether the policy is paused in this step, which then has no drafts: see `PausingLength`."""
        goes_on = self._spare == schedule.spare_tokens and not (schedule.admitted or schedule.preempted)
        self.paused = self._left > 0 and goes_on
        self._left = self._left - 1 if self.paused else 0
        return self.paused

    def trim(self, requests: Sequence[Request], drafts: Sequence[DraftTree]) -> Sequence[DraftTree]:
        """Cut the deterministic drafts that have scores; an error of the policy keeps them whole.

        Drafts of a beam search stay whole: they begin with its live hypotheses, which the step has to compute.
        """
        if self._trim is None:
            return drafts
        places, seen = list[int](), list[ScoredDraft]()
        for place, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            if draft.scores is not None and draft.probs is None and request.search is None:
                places.append(place)
                seen.append(ScoredDraft(request, draft.scores, draft.parent_list))
        if not places:
            return drafts
        try:
            counts = list(map(index, self._trim(seen)))
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self._guard.note(_NAME, error)
            return drafts
        cut = list(drafts)
        for place, count in zip(places, counts, strict=False):
            cut[place] = drafts[place].first(max(0, count))
        return cut

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Pass on the outcomes of a step's drafts, which are committed by now."""
        try:
            self._policy.observe(outcomes, timing)
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self._guard.note(_NAME, error)
