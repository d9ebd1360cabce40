"""The costs of a step's parts on this machine: a target pass by its rows, and a draft by its depth.

Curves are measured once (lengths/calibration.py) and follow the times of steps while the engine runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, repeat
from operator import add, mul
from typing import NamedTuple

import numpy as np

DRIFT, LOCAL = 0.1, 0.1  # weights of a new step: on the whole curve, and on its own point; the first ones have more
SLOWER, FASTER = 0.3, 0.75  # weights of steps without drafts, which are rare
LEARNT = 16  # steps
OUTLIER = 1.3  # a step counts as at most this many times slower than expected: so curves stay near the usual time
FAST, TRUSTED = (
    0.67,
    0.95,
)  # a step below this share of the expected time has this weight: no disturbance makes a step too fast
LEAST_UNDRAFTED = 0.33  # of a pass after another one, in proportion to one after a draft
ROW_SHARE = 0.02  # of a pass of one row: what one more row costs that reads nothing more
MOST_PENDING = 8  # steps that wait until the curve is read
LEAST_TABLE = 32  # sizes that are interpolated at once


class CostCurve:
    """Seconds as a function of a whole number, linear between the measured points and beyond the last one.

    points: at least one, from 1 up. Costs may jump or fall: a kernel may be slower at 9 rows than at 12. reads: what a
    step of a size reads, in proportion to one of size 1; None = the same at each size. Between two points, seconds are
    then linear in a size's ROW_SHARE plus what it reads: few rows of a model with experts read almost as many
    different experts as they use, and many rows read all of them.
    """

    def __init__(self, points: Mapping[int, float], reads: Callable[[int], float] | None = None) -> None:
        self._points = dict(sorted(points.items()))
        self._reads, self._places = reads, list[float]()  # of the sizes from 0 up, between which seconds are linear
        self._scale = 1.0
        self._table: list[float] = []
        self._pending: list[tuple[int, float]] = []
        self._seen = 0  # steps

    @property
    def is_learnt(self) -> bool:
        """Whether enough real steps were timed: they differ from the loop that measured the curve."""
        return self._seen >= LEARNT

    def rescale(self, factor: float) -> None:
        """Multiply the time of every size by a factor."""
        self._scale *= factor

    def at(self, size: int) -> float:
        """Return the seconds at a size."""
        if self._pending:
            self._follow()
        if size >= len(self._table):
            self._table = self._interpolated(max(LEAST_TABLE, 2 * size + 2))
        return self._table[size] * self._scale

    def between(self, first: int, end: int) -> list[float]:
        """Return the seconds at the sizes first to end - 1."""
        self.at(end)
        return list(map(mul, self._table[first:end], repeat(self._scale)))

    def observe(self, size: int, seconds: float) -> None:
        """Follow a step of this size that took `seconds`; the curve changes when it is read next."""
        self._pending.append((size, seconds))
        if len(self._pending) == MOST_PENDING:
            self._follow()

    def _follow(self) -> None:
        """Move each point that steps have timed by the mean of its steps, and the whole curve by that of all steps."""
        pending, self._pending = self._pending, []
        ratios: dict[int, list[float]] = {}
        for size, seconds in pending:
            ratios.setdefault(size, []).append(min(seconds / self.at(size), OUTLIER))
        self._seen += len(pending)
        whole = _moved(
            max(DRIFT, 1 / self._seen), [max(ratio, 1 / OUTLIER) for own in ratios.values() for ratio in own]
        )
        known = {size: self._table[size] for size in ratios}
        self._scale *= whole
        for size, own in ratios.items():
            relative = [ratio / whole for ratio in own]
            if sum(relative) < FAST * len(relative):
                self._lower(size, known[size] * _moved(TRUSTED, relative))
            elif size in self._points:
                self._points[size] *= _moved(LOCAL, relative)
                self._table = []

    def _lower(self, size: int, seconds: float) -> None:
        """Set the seconds of a size; no smaller size takes more."""
        self._points[size] = seconds
        self._points = {each: min(own, seconds) if each < size else own for each, own in sorted(self._points.items())}
        self._table = []

    def _interpolated(self, count: int) -> list[float]:
        """Return the seconds at the sizes 0 to count - 1, without the scale."""
        sizes, known, seconds = np.arange(count), [*self._points], [*self._points.values()]
        if self._reads is None:
            table = np.interp(sizes, known, seconds)
        else:
            table = np.interp(self._place(count)[:count], [self._place(1 + size)[size] for size in known], seconds)
        if len(known) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            table += slope * np.maximum(0, sizes - known[-1])
        values: list[float] = table.tolist()
        return values

    def _place(self, count: int) -> list[float]:
        """Return the places of at least the sizes 0 to count - 1."""
        assert self._reads is not None
        self._places += [ROW_SHARE * size + self._reads(size) for size in range(len(self._places), count)]
        return self._places


def _moved(weight: float, ratios: list[float]) -> float:
    """Return the factor by which new steps move an old value; ratios: their times over the expected ones."""
    share: float = 1 - (1 - weight) ** len(ratios)
    return 1 + share * (sum(ratios) / len(ratios) - 1)


class KeyCosts(NamedTuple):
    """The time that attention adds for each key of a sequence, as a share of a pass of one row after a short text.

    first: for one row of the sequence. further: for each further row.
    """

    first: float = 0.0
    further: float = 0.0


NO_KEY_COSTS = KeyCosts()


class AttentionSeconds(NamedTuple):
    """The seconds that attention adds to a pass after its sequences' texts: without drafts, and for each node."""

    plain_s: float = 0.0
    node_s: float = 0.0

    def seconds(self, nodes: int) -> float:
        """Return the seconds with a number of nodes."""
        return self.plain_s + nodes * self.node_s


NO_ATTENTION = AttentionSeconds()


class Reading(NamedTuple):
    """The seconds that a drafter with a cache of its own takes for a text: for each token, and each key before it."""

    token_s: float
    key_s: float

    def seconds(self, first: int, end: int) -> float:
        """Return the seconds of the tokens first to end - 1."""
        return (end - first) * (self.token_s + self.key_s * (first + end) / 2)


@dataclass
class StepCosts:
    """The curves of an engine, in seconds.

    passes: a target pass and its verdicts after a short text, by rows; keys: the addition of a long text. drafts: for
    each method and number of sequences, a draft by depth. readings: by method; none = it reads nothing before a draft.
    rest_s: the remaining seconds of a step with drafts; plain_rest_s: those of one without.

    A pass that follows another one without a draft between them is faster: weights that fit a processor's cache are
    still there. The curve is measured with such passes; real steps then move it to the time of passes after a model's
    drafts. Until the curve has learnt, the time of passes without drafts stays as measured. From then on it is a share
    of the curve, because both change with the machine.
    """

    passes: CostCurve
    drafts: dict[str, dict[int, CostCurve]] = field(default_factory=dict)
    rest_s: float = 0.0
    plain_rest_s: float = 0.0
    keys: KeyCosts = NO_KEY_COSTS
    readings: Mapping[str, Reading] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._one_s = self.passes.at(1)  # without drafts
        self._share: float | None = None  # of the curve's; None = it had not learnt when `_one_s` was seen

    @property
    def undrafted(self) -> float:
        """The time of passes without drafts between them, as a share of that of passes after drafts: at most 1."""
        return min(1.0, self._one_s / self.passes.at(1)) if self._share is None else self._share

    def attention(self, sequences: Iterable[tuple[int, int]]) -> AttentionSeconds:
        """Return the time that attention adds to a pass of sequences, from each one's rows without a draft and keys."""
        one_s, shares, counts = self.passes.at(1), list[float](), list[int]()
        for rows, keys in sequences:
            shares.append(keys * (self.keys.first + (rows - 1) * self.keys.further))
            counts.append(keys)
        return AttentionSeconds(one_s * sum(shares), one_s * self.keys.further * sum(counts) / max(1, len(counts)))

    def steps_s(self, rows: int, plain_s: float, most: int, attention: AttentionSeconds = NO_ATTENTION) -> list[float]:
        """Return the seconds of steps with `rows` and 0 to `most` nodes, without drafting: at least those of no nodes.

        plain_s: of a pass without nodes, with its attention.
        """
        passes = self.passes.between(rows + 1, rows + most + 1)
        if attention != NO_ATTENTION:
            passes = list(map(add, passes, count(attention.seconds(1), attention.node_s)))
        rest_s = max(self.rest_s, self.plain_rest_s)
        return [self.plain_rest_s + plain_s, *map(add, repeat(rest_s), map(max, passes, repeat(plain_s)))]

    def draft_s(self, method: str, sequences: int, depth: int) -> float:
        """Return the time to draft to a depth for some sequences; 0 for depth 0, and for a method without curves."""
        curves = self.drafts.get(method)
        if not curves or not depth:
            return 0.0
        if sequences in curves or len(curves) == 1:
            return curves.get(sequences, next(iter(curves.values()))).at(depth)
        counts = sorted(curves)
        place = min(max(bisect_left(counts, sequences), 1), len(counts) - 1)
        fewer, more = counts[place - 1], counts[place]
        low, high = curves[fewer].at(depth), curves[more].at(depth)
        return max(low, low + (sequences - fewer) / (more - fewer) * (high - low))

    def observe_draft(self, method: str, sequences: int, depth: int, seconds: float) -> None:
        """Follow a draft of one method that took `seconds`."""
        curves = self.drafts.get(method)
        if curves and depth:
            nearest = min(curves, key=lambda count: abs(count - sequences))
            if nearest != sequences:
                seconds *= curves[nearest].at(depth) / self.draft_s(method, sequences, depth)
            curves[nearest].observe(depth, seconds)

    def observe_pass(self, rows: int, seconds: float, attention_s: float, alike: bool = False) -> None:
        """Update the curve by a pass whose attention was expected to take attention_s.

        A deviation from the expected time is shared in proportion with attention. alike: no model drafted for the pass,
        so a pass without a draft would deviate as much.
        """
        if alike and self._share is None:
            self._share = self.undrafted
        short_s = self.passes.at(rows)
        self.passes.observe(rows, seconds * short_s / (short_s + attention_s))

    def compare_undrafted(self, rows: int, seconds: float, attention_s: float = 0.0) -> None:
        """Compare a pass without drafts with the curve, which has the time of the passes with drafts shortly before.

        Other programs may slow a pass down. So the share never exceeds 1, and it rises only little by little.
        """
        ratio = min(max(seconds / (self.passes.at(rows) + attention_s), LEAST_UNDRAFTED), 1.0)
        more = ratio - self.undrafted
        self._know(self.undrafted + (SLOWER if more > 0 else FASTER) * more)

    def observe_undrafted(self, rows: int, seconds: float, attention_s: float = 0.0) -> None:
        """Follow a pass long after the last one with drafts: the time of these may have changed too."""
        ratio = seconds / ((self.passes.at(rows) + attention_s) * self.undrafted)
        factor = _moved(SLOWER, [min(max(ratio, LEAST_UNDRAFTED), OUTLIER)])
        if self._share is None:
            self._know(min(1.0, factor * self.undrafted))
        else:
            self.passes.rescale(factor)

    def _know(self, share: float) -> None:
        self._one_s, self._share = share * self.passes.at(1), share if self.passes.is_learnt else None

    def observe_rest(self, seconds: float) -> None:
        """Follow the remaining time of a step with drafts; it counts as at most a pass."""
        self.rest_s += LOCAL * (min(seconds, self.passes.at(1)) - self.rest_s)

    def observe_plain_rest(self, seconds: float) -> None:
        """Follow the remaining time of a step without drafts."""
        self.plain_rest_s += LOCAL * (min(seconds, self.passes.at(1)) - self.plain_rest_s)
