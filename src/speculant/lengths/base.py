"""The draft-length policy, what it is built from and observes, and the guard around it in an engine.

A policy is one module with a function `build(context) -> DraftLength`; the module's name is the policy's name. It may
also have a function `stop_below(options) -> float`: see `DrafterContext`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple, cast

from typing_extensions import override

from speculant.drafting import DrafterNeeds
from speculant.errors import DraftLengthError, Guard
from speculant.lengths.costs import StepCosts
from speculant.lengths.measuring import Measurement
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from speculant.types import DraftPrice, DraftTree, Request

logger = logging.getLogger(__name__)
_NAME = "the draft length policy"
LONGEST = 16  # nodes of a draft unless the user sets a number


class DraftOutcome(NamedTuple):
    """What came of one sequence's draft. Each list has an entry per depth, from the root's children on.

    drafted: nodes of the draft. tested: 1 if the target's distribution was compared with nodes at this depth, 0 after a
    rejection or an end. accepted: 1 if a node was committed, else 0. path: the accepted nodes, root to leaf.
    look_ahead_rows: of the draft, in the target's pass. missing: nodes that the drafter was asked for and did not
    return; the lists are empty if it returned none. forced: a constraint forced these nodes, and no drafter was asked.
    """

    request: Request
    drafted: Sequence[int]
    tested: Sequence[int]
    accepted: Sequence[int]
    path: Sequence[int] = ()
    look_ahead_rows: int = 0
    missing: int = 0
    forced: bool = False


class ScoredDraft(NamedTuple):
    """The part of a draft that a policy may see: its shape and the drafter's scores (see `DraftTree`), but no tokens.

    It exists for deterministic drafts alone. If a drawn token were kept or dropped by its own score, the output of a
    ratio rule would have another distribution.
    """

    request: Request
    scores: Sequence[float]
    parents: Sequence[int]


class DraftLength(ABC):
    """Chooses draft lengths from past outcomes alone. A policy extends it and defines at least `choose`.

    `choose` runs before anything is drawn, so that it can't depend on drawn tokens: that would bias ratio rules.
    keeps_up: whether drafters also process the tokens of sequences whose length is 0, so that no backlog builds up.
    observes: whether it learns from steps, as a class that defines `observe` does.
    """

    keeps_up: bool = False
    observes = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "observe" in vars(cls):
            cls.observes = True

    @abstractmethod
    def choose(self, schedule: Schedule) -> list[int]:
        """Return the wanted number of nodes for each item of the schedule; 0 = no draft.

        The lengths are then cut to the limits of budget, memory, context and drafter. For a beam search they are
        numbers of rounds.
        """

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:  # noqa: B027 - it may learn nothing
        """Record a step: its timing, and the outcomes of all sequences with a draft or a call for one."""

    def pause(self) -> int:
        """Return for how many steps after this one, which drafts nothing, neither `choose` nor `observe` is called.

        The pause ends early if a sequence comes or goes, or does anything but decode. A policy that `keeps_up` has
        none.
        """
        return 0

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        """Return how many nodes of each deterministic draft with scores are kept, counted from its first."""
        return [len(draft.scores) for draft in drafts]

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """Whether a deterministic draft is worth more than one that a model would draw; see `Selector`."""
        return True

    def longest_unscored(self, request: Request) -> int | None:
        """Return the most nodes that a model draws in this step, None = no bound; see `Selector`."""
        return None


_CALLS = ("keeps_up", "observes", "choose", "observe", "pause", "trim", "prefers", "longest_unscored")


def completed(policy: Any) -> DraftLength:
    """Return a policy that need not extend `DraftLength`, as one of another package: what it lacks is as usual."""
    if all(hasattr(policy, call) for call in _CALLS):
        return cast(DraftLength, policy)
    found = _Usual()
    found.observes = hasattr(policy, "observe")
    for call in _CALLS:
        if hasattr(policy, call):
            setattr(found, call, getattr(policy, call))
    return found


class _Usual(DraftLength):
    @override
    def choose(self, schedule: Schedule) -> list[int]:
        raise DraftLengthError("the policy has no call `choose`", "define it; see docs/adding-a-draft-length.md.")


@dataclass(frozen=True)
class DraftLengthContext:
    """The values that a policy is built from.

    num_speculative_tokens: the configured length, or the method's usual one. options: the policy's own keys. longest:
    the configured length alone; None = the policy chooses. costs: measures this machine's costs; None = can't. needs:
    of a method's drafter. price: where the policy says what a further token of a method's chains costs; None = nowhere.
    """

    num_speculative_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None
    costs: Callable[[], StepCosts | None] = lambda: None
    needs: Callable[[str], DrafterNeeds] = lambda method: DrafterNeeds()
    price: Callable[[str], DraftPrice | None] = lambda method: None


class GuardedLength:
    """A policy that is checked: after an error, or for lengths that break its contract, the step has no drafts.

    measurement: of the costs that the policy compares. Until it ends, the policy is not called, and nothing is drafted.
    """

    def __init__(self, policy: DraftLength, measurement: Measurement | None = None) -> None:
        self.policy, self._measurement = policy, measurement or Measurement()
        self.keeps_up, self.observes = policy.keeps_up, policy.observes
        self._guard = Guard(logger, "and the step goes on without drafts")
        self.paused = False  # in this step, which the policy does not observe either
        self._left, self._spare = 0, 0  # steps of the pause, and the spare tokens of each: the same rows are scheduled

    def choose(self, schedule: Schedule) -> list[int] | None:
        """Return the policy's draft length for each item; None = it pauses, and every sequence has begun."""
        count, left, self._left = len(schedule.items), self._left, 0
        if left and self._spare == schedule.spare_tokens and not (schedule.admitted or schedule.preempted):
            self.paused, self._left = True, left - 1
            return None
        self.paused = self._measurement.active
        if self.paused:
            return [0] * count
        try:
            lengths = list(map(index, self.policy.choose(schedule)))
            if len(lengths) != count or (lengths and min(lengths) < 0):
                raise DraftLengthError(f"the lengths are {lengths!r} for {count} sequences", "give each one from 0 up.")
            if not (self.keeps_up or any(lengths)):
                self._left, self._spare = index(self.policy.pause()), schedule.spare_tokens
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self._guard.note(_NAME, error)
            return [0] * count
        return lengths

    def trim(self, requests: Sequence[Request], drafts: Sequence[DraftTree]) -> Sequence[DraftTree]:
        """Cut the deterministic drafts that have scores; an error of the policy keeps them whole.

        Drafts of a beam search stay whole: they begin with its live hypotheses, which the step has to compute.
        """
        places, seen = list[int](), list[ScoredDraft]()
        for place, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            if draft.scores is not None and draft.probs is None and request.search is None:
                places.append(place)
                seen.append(ScoredDraft(request, draft.scores, draft.parent_list))
        if not places:
            return drafts
        try:
            counts = list(map(index, self.policy.trim(seen)))
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
            self.policy.observe(outcomes, timing)
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self._guard.note(_NAME, error)


def num_rows(nodes: int, look_ahead_rows: int, sequences: int = 1) -> int:
    """Return the rows of drafts with a number of nodes, with up to `look_ahead_rows` below each root and node."""
    return nodes + (nodes + sequences) * min(nodes, look_ahead_rows)
