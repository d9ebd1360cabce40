"""One schedule for all experiments: what does not pay, or was measured long ago, is tried again now and then.

An experiment has a name, such as ("draft", "ngram"), and a price: the time that it loses if it shows nothing new, in
plain steps. The wait between two experiments of a name doubles until they take at most the share BUDGET of the time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

FIRST_WAIT = 16  # steps between two experiments of a name
BUDGET = 0.005  # of the time
MOST_REPEATS = 3  # of an experiment at once, while it promises something


@dataclass
class Experiment:
    """When something is tried again. wait: steps between the last time and the next. due: the step of the next.

    price: that of the tries so far that follow one another at once. running: whether a try has not ended.
    """

    wait: int = 0
    due: int = FIRST_WAIT
    price: float = 0.0
    repeats: int = 0
    running: bool = False

    def begin(self, price: float) -> None:
        """Note that it runs from now on, at a price."""
        self.price, self.running = self.price + price, True

    def end(self, step: int, again: bool = False) -> None:
        """Note that a try is over and has changed nothing. again: it promises something, and is repeated at once."""
        self.running = False
        if again and self.repeats < MOST_REPEATS:
            self.repeats, self.due = self.repeats + 1, step
            return
        self.wait = int(max(FIRST_WAIT, min(2 * self.wait, self.price / BUDGET)))
        self.due, self.price, self.repeats = step + self.wait, 0.0, 0

    def restart(self, step: int) -> None:
        """Start the waits anew: the plan itself does now what the experiment tries."""
        self.wait, self.due, self.price, self.repeats, self.running = FIRST_WAIT, step + FIRST_WAIT, 0.0, 0, False


class Experiments(defaultdict[tuple[str, str], Experiment]):
    """The experiments of an engine, by kind and method. step: the number of steps so far."""

    def __init__(self) -> None:
        super().__init__(Experiment)
        self.step = 0

    def left(self, kind: str, method: str) -> int:
        """Return the steps until an experiment is due; 0 = now."""
        return max(0, self[kind, method].due - self.step)
