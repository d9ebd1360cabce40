"""What the parts of a step cost on this machine: a target pass by its rows, and a draft by its depth.

Curves are measured once (engine/calibration.py) and follow what the steps take while the engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DRIFT, LOCAL = 0.05, 0.1  # weights of the newest step: on the whole curve, and on its own point
OUTLIER = 3.0  # a step counts as at most this many times slower or faster than expected

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class CostCurve:
    """Seconds by a whole number, linear between the measured points and beyond the last one.

    points: at least one, from 1 up. Costs need not be even or monotone: a kernel may be slower at 9 rows than at 12.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = np.array(sorted(points), dtype=np.float64)
        self._seconds = np.array([points[size] for size in sorted(points)])
        self._scale = 1.0
        self._table = np.empty(0)

    def at(self, size: int) -> float:
        """Return the seconds at a size."""
        return float(self.up_to(size)[size])

    def up_to(self, most: int) -> Floats:
        """Return the seconds at the sizes 0 to at least `most`."""
        if len(self._table) <= most:
            self._table = self._interpolated(np.arange(2 * most + 2))
        return self._table * self._scale

    def observe(self, size: int, seconds: float) -> None:
        """Follow a step of this size that took so long."""
        ratio = min(max(seconds / self.at(size), 1 / OUTLIER), OUTLIER)
        place = int(np.searchsorted(self._sizes, size))
        if place < len(self._sizes) and self._sizes[place] == size:
            self._seconds[place] *= 1 + LOCAL * (ratio - 1)
            self._table = self._table[:0]
        self._scale *= 1 + DRIFT * (ratio - 1)

    def _interpolated(self, sizes: Integers) -> Floats:
        known, seconds = self._sizes, self._seconds
        table: Floats = np.interp(sizes, known, seconds)
        if len(known) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            table += slope * np.maximum(0, sizes - known[-1])
        return table


@dataclass
class StepCosts:
    """The curves of an engine, in seconds.

    passes: a target pass and its verdicts, by rows. drafts: for each method and number of sequences, a draft by depth.
    rest_s: what else a step takes.
    """

    passes: CostCurve
    drafts: dict[str, dict[int, CostCurve]] = field(default_factory=dict)
    rest_s: float = 0.0

    def draft_s(self, method: str, sequences: Integers, depths: Integers) -> Floats:
        """Return the times to draft so deep for so many sequences; 0 for depth 0, and for a method without curves."""
        curves = self.drafts.get(method)
        if not curves:
            return np.zeros(len(depths))
        counts, most = sorted(curves), int(depths.max(initial=0))
        seconds = [curves[count].up_to(most)[depths] for count in counts]
        place = np.clip(np.searchsorted(counts, sequences), 1, len(counts) - 1) if len(counts) > 1 else 0
        if len(counts) == 1:
            return np.where(depths > 0, seconds[0], 0.0)
        rows, columns = np.array(seconds), np.arange(len(depths))
        low, high = rows[place - 1, columns], rows[place, columns]
        fewer, more = np.array(counts)[place - 1], np.array(counts)[place]
        between = low + (sequences - fewer) / (more - fewer) * (high - low)
        return np.where(depths > 0, np.maximum(between, low), 0.0)

    def observe_draft(self, method: str, sequences: int, depth: int, seconds: float) -> None:
        """Follow a draft of one method that took so long."""
        curves = self.drafts.get(method)
        if curves and depth:
            (expected,) = self.draft_s(method, np.array([sequences]), np.array([depth]))
            nearest = min(curves, key=lambda count: abs(count - sequences))
            curves[nearest].observe(depth, curves[nearest].at(depth) * seconds / expected)

    def observe_rest(self, seconds: float) -> None:
        """Follow what the rest of a step took."""
        self.rest_s += LOCAL * (seconds - self.rest_s)
