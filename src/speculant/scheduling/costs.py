"""What the parts of a step cost on this machine: a target pass by its rows, and a draft by its depth.

Curves are measured once (engine/calibration.py) and follow what the steps take while the engine runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

DRIFT, LOCAL = 0.05, 0.1  # weights of the newest step: on the whole curve, and on the point next to it
OUTLIER = 3.0  # a step counts as at most this many times slower or faster than expected


class CostCurve:
    """Seconds by a whole number from 1 up, linear between the measured points and beyond the last one.

    points: at least one. Costs need not be even or monotone: a kernel may be slower at 9 rows than at 12.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = [points[size] for size in self._sizes]
        self._scale = 1.0
        self._known: dict[int, float] = {}

    def at(self, size: int) -> float:
        """Return the seconds at a size."""
        if size not in self._known:
            self._known[size] = self._interpolated(size)
        return self._known[size] * self._scale

    def observe(self, size: int, seconds: float) -> None:
        """Follow a step of this size that took so long."""
        ratio = min(max(seconds / self.at(size), 1 / OUTLIER), OUTLIER)
        place = self._nearest(size)
        if self._sizes[place] == size:  # the point moves by what the whole curve does not explain
            self._seconds[place] *= 1 + LOCAL * (ratio - 1)
            self._known.clear()
        self._scale *= 1 + DRIFT * (ratio - 1)

    def _nearest(self, size: int) -> int:
        return min(bisect_left(self._sizes, size), len(self._sizes) - 1)

    def _interpolated(self, size: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) == 1 or size <= sizes[0]:
            return seconds[0]
        upper = max(1, self._nearest(size))
        share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
        return max(seconds[upper - 1] + share * (seconds[upper] - seconds[upper - 1]), min(seconds))


@dataclass
class StepCosts:
    """The curves of an engine, in seconds.

    passes: a target pass and its verdicts, by rows. drafts: for each method and number of sequences, a draft by depth.
    rest_s: what else a step takes.
    """

    passes: CostCurve
    drafts: dict[str, dict[int, CostCurve]] = field(default_factory=dict)
    rest_s: float = 0.0

    def draft_s(self, method: str, sequences: int, depth: int) -> float:
        """Return the time to draft so deep for so many sequences; 0 for a method that nobody measured."""
        curves = self.drafts.get(method)
        if not curves or not depth or not sequences:
            return 0.0
        sizes = sorted(curves)
        place = min(bisect_left(sizes, sequences), len(sizes) - 1)
        upper = sizes[place]
        if upper == sequences or len(sizes) == 1:
            return curves[upper].at(depth)
        lower = sizes[max(0, place - 1)] if upper > sequences else sizes[place - 1]
        low, high = curves[lower].at(depth), curves[upper].at(depth)
        return max(low, low + (sequences - lower) / (upper - lower) * (high - low))

    def observe_draft(self, method: str, sequences: int, depth: int, seconds: float) -> None:
        """Follow a draft of one method that took so long."""
        curves = self.drafts.get(method)
        if curves:
            expected = self.draft_s(method, sequences, depth)
            nearest = min(curves, key=lambda size: abs(size - sequences))
            curves[nearest].observe(depth, curves[nearest].at(depth) * seconds / expected)

    def observe_rest(self, seconds: float) -> None:
        """Follow what the rest of a step took."""
        self.rest_s += LOCAL * (seconds - self.rest_s)
