"""The length of a run and its learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from speculant.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """A run ends after a number of steps or of minutes, whichever comes first.

    The rate rises over the first `warmup` steps, then falls in a straight line and reaches zero at the
    end. With a time budget it depends on the clock, so a slow machine takes fewer steps but still
    ends on time and with a rate of zero.
    """

    steps: int | None
    minutes: float | None
    warmup: int = 50

    def __post_init__(self) -> None:
        if not self.steps and not self.minutes:
            raise ConfigError("a run needs an end", "give --steps, --minutes or both.")

    def progress(self, step: int, elapsed: float) -> float:
        """Return how much of the run is over, in [0, 1], after `step` steps and `elapsed` seconds."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def factor(self, step: int, progress: float) -> float:
        """Return the fraction of the peak rate to use for the step with this number, counted from 0."""
        return min(1.0, (step + 1) / self.warmup) * (1.0 - progress)
