"""The time that requests add to a step beside the rows of its pass.

Masks, edits of logits, log-probabilities, beams and stop strings take time on the engine's thread, so every other
sequence of the step waits for it. That time is measured per sequence, where it is spent. `WorkBudget` limits it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

FIRST_S = 2e-3  # per row, at least, of a sequence's first step: the first mask of a form takes longer than later ones
NEWEST = 0.3  # weight of the newest step in a mean
MOST_RISE = 4.0  # a step counts as at most this many times the mean: the machine may have been stopped


@dataclass(slots=True)
class WorkRate:
    """The mean time per row with results, in seconds."""

    row_s: float = FIRST_S

    def follow(self, row_s: float) -> None:
        """Follow the time per row of a step."""
        self.row_s += NEWEST * (min(row_s, MOST_RISE * self.row_s + FIRST_S) - self.row_s)


class StepWork:
    """The measured work of one sequence; it is a context around that work. A nested use counts once.

    kind: the rate of sequences with the same settings; None = the settings add no work, and nothing is measured. Its
    own rate starts there, or at FIRST_S if that is more. The clock runs while masks are awaited from another thread.
    """

    __slots__ = ("_depth", "_kind", "_rate", "_spent_s", "_started", "drafts", "last_s")

    def __init__(self, kind: WorkRate | None = None) -> None:
        self._kind, self._rate = kind, WorkRate(0.0 if kind is None else max(FIRST_S, kind.row_s))
        self._depth, self._started, self._spent_s = 0, 0.0, 0.0
        self.last_s = 0.0  # in the last step
        self.drafts = WorkRate(0.0 if kind is None else FIRST_S)  # of drafting for a beam search, per drafted node

    def __deepcopy__(self, memo: object) -> StepWork:
        """Return itself: a copy of a request is no other sequence."""
        return self

    def __enter__(self) -> None:
        if self._kind is not None:
            if not self._depth:
                self._started = time.perf_counter()
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kind is not None:
            self._depth -= 1
            if not self._depth:
                self._spent_s += time.perf_counter() - self._started

    @property
    def row_s(self) -> float:
        """The estimated time of a row with results, in seconds."""
        return self._rate.row_s

    def settle(self, rows: int) -> None:
        """End a step that gave results for a number of rows."""
        if self._kind is not None:
            self.last_s, self._spent_s = self._spent_s, 0.0
            if rows:
                self._rate.follow(self.last_s / rows)
                self._kind.follow(self.last_s / rows)


NO_WORK = StepWork()
