"""One schedule for all experiments: now and then it retries choices that did not pay or were measured long ago.

An experiment has a kind and a method, such as ("draft", "ngram"). Its price is its expected cost, or its measured cost
if that is lower, because the expectation may have been wrong. The unit is the time of a step without drafts. Each kind
and method may cost the share BUDGET of the time, whatever the others cost: a costly experiment does not delay the
others.
"""

from __future__ import annotations

import math

from speculant.lengths.costs import LEARNT

BUDGET = 0.002  # of the time, for each experiment


class Experiments:
    """The experiments of an engine. step: the number of steps so far."""

    def __init__(self) -> None:
        self.step = 0
        self._due: dict[tuple[str, str], float] = {}  # the step from which one may begin again; at first LEARNT
        self._prices: dict[tuple[str, str], float] = {}  # expected, of those that have begun and not ended
        self._lost: dict[tuple[str, str], float] = {}  # by them so far

    def left(self, kind: str, method: str = "") -> int:
        """Return the steps until an experiment may begin; 0 = now."""
        return max(0, math.ceil(self._due.get((kind, method), LEARNT)) - self.step)

    def runs(self, kind: str, method: str = "") -> bool:
        """Whether an experiment has begun and not ended."""
        return (kind, method) in self._prices

    def begin(self, kind: str, method: str = "", *, price: float) -> None:
        """Begin an experiment. price: its expected cost, in plain steps."""
        self._prices[kind, method] = price

    def lose(self, plain_steps: float) -> None:
        """Add the cost of a step to the experiments that run; it is negative if the step was faster than expected."""
        for name in self._prices:
            self._lost[name] = self._lost.get(name, 0.0) + plain_steps

    def end(self, kind: str, method: str = "", least: int = 0) -> bool:
        """End an experiment; return whether it ran. least: the fewest steps until the next one."""
        expected = self._prices.pop((kind, method), None)
        if expected is None:
            return False
        price = max(0.0, min(expected, self._lost.pop((kind, method), expected)))
        self._due[kind, method] = self.step + max(least, price / BUDGET)
        return True
