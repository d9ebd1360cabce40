"""What steps cost on this machine: a target pass by its rows, a draft by its depth, and the reading of a backlog.

Curves are measured once (measuring.py) and follow the times of steps while the engine runs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from operator import add, itemgetter, mul
from statistics import median_low
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from speculant.metrics import StepTiming
from speculant.types import Request

DRIFT = 0.05  # weight of a step's time; the first ones have more
OUTLIER = 0.1  # logarithm by which a step counts as slower or faster at most
LEARNT = 16  # first steps, whose median is the level
COMPARED, NEAR = 5, 8  # last steps of a kind that are compared with steps of the other kind, and how long they count
SMALLEST = 1e-9  # ratio of times
UNKNOWN_COSTS = {1: 1.0, 64: 1.5}  # of a pass, in any unit, if nothing was measured
ROW_SHARE = 0.02  # of a pass of one row: what one more row costs that reads nothing more
LEAST_TABLE = 32  # sizes that are interpolated at once
LEAST_BACKLOG = 8  # missing tokens; fewer are part of a draft
USUAL_ANSWER = 1024  # tokens that a request without max_tokens may still get


@dataclass
class Slowness:
    """How much slower than at the start steps are, as a logarithm: the median of the first, which later ones move.

    learnt: is called with the median once it is known.
    """

    value: float = 0.0
    first: list[float] = field(default_factory=list)
    learnt: Callable[[float], None] = lambda value: None

    def follow(self, ratio: float) -> None:
        """Follow a step, by the logarithm of the ratio of its time to that at the start."""
        if len(self.first) >= LEARNT:
            self.value += DRIFT * min(max(ratio - self.value, -OUTLIER), OUTLIER)
            return
        self.first.append(ratio)
        self.value = median_low(self.first)
        if len(self.first) == LEARNT:
            self.learnt(self.value)


@dataclass
class Mean:
    """A running mean; a number counts as at most twice the mean before it."""

    value: float = 0.0
    seen: int = 0

    def add(self, number: float) -> None:
        """Add a number."""
        number = min(number, 2 * self.value) if self.seen else number
        self.seen += 1
        self.value += max(DRIFT, 1 / self.seen) * (number - self.value)


class CostCurve:
    """Seconds as a function of a whole number, linear between the measured points and beyond the last one.

    points: at least one, from 1 up. Costs may jump or fall: a kernel may be slower at 9 rows than at 12. reads: what a
    step of a size reads, in proportion to one of size 1; None = the same at each size. Between two points, seconds are
    then linear in a size's ROW_SHARE plus what it reads: few rows of a model with experts read almost as many
    different experts as they use, and many rows read all of them. level: of all seconds.
    """

    def __init__(self, points: Mapping[int, float], reads: Callable[[int], float] | None = None) -> None:
        self._points = dict(sorted(points.items()))
        self._reads, self._places = reads, list[float]()  # of the sizes from 0 up, between which seconds are linear
        self._table: list[float] = []  # seconds by size, without the level; empty after a change
        self._seen = Counter[int]()  # steps by size
        self.level = Slowness()

    def at(self, size: int) -> float:
        """Return the seconds at a size."""
        table = self._table if size < len(self._table) else self._interpolate(size)
        return table[size] * math.exp(self.level.value)

    def between(self, first: int, end: int) -> list[float]:
        """Return the seconds at the sizes first to end - 1."""
        table = self._table if end < len(self._table) else self._interpolate(end)
        return list(map(mul, table[first:end], repeat(math.exp(self.level.value))))

    def observe(self, size: int, seconds: float) -> None:
        """Follow a step of this size: all sizes' seconds move, then this size's alone. No smaller size takes more."""
        known_s = (self._table if size < len(self._table) else self._interpolate(size))[size]
        ratio = max(seconds / (known_s * math.exp(self.level.value)), SMALLEST)
        self.level.follow(math.log(ratio) + self.level.value)
        self._seen[size] += 1
        ratio = max(seconds / (known_s * math.exp(self.level.value)), SMALLEST)
        change = min(math.log(ratio), OUTLIER)  # no other program makes a step fast
        own = known_s * math.exp(change / (1 + self._seen[size]))
        if size not in self._points:
            self._points = dict(sorted([*self._points.items(), (size, own)]))
        self._points[size] = own
        for each, known in self._points.items():
            if each < size and known > own:
                self._points[each] = own
        self._table = []

    def _interpolate(self, size: int) -> list[float]:
        """Make and return a table of the sizes up to this one, and of more."""
        count, known, seconds = max(LEAST_TABLE, 2 * size + 2), [*self._points], [*self._points.values()]
        sizes = np.arange(count)
        if self._reads is None:
            table = np.interp(sizes, known, seconds)
        else:
            most = max(count, known[-1] + 1)
            if len(self._places) < most:
                self._places += [ROW_SHARE * size + self._reads(size) for size in range(len(self._places), most)]
            table = np.interp(self._places[:count], [*map(self._places.__getitem__, known)], seconds)
        if len(known) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            table += slope * np.maximum(0, sizes - known[-1])
        self._table = table.tolist()
        return self._table


class KeyCosts(NamedTuple):
    """The time that attention adds for each key of a sequence, as a share of a pass of one row after a short text.

    first: for one row of the sequence. further: for each further row.
    """

    first: float = 0.0
    further: float = 0.0


class AttentionSeconds(NamedTuple):
    """The seconds that attention adds to a pass after its sequences' texts: without drafts, and for each node."""

    plain_s: float = 0.0
    node_s: float = 0.0


NO_ATTENTION = AttentionSeconds()


_LEVEL = itemgetter(1)  # of a step's number and level
_NO_TABLE = np.zeros((0, LEAST_TABLE))


class Reading(NamedTuple):
    """The seconds that a drafter with a cache of its own takes for a text: for each token, and each key before it."""

    token_s: float
    key_s: float

    def seconds(self, first: int, end: int) -> float:
        """Return the seconds of the tokens first to end - 1."""
        return (end - first) * (self.token_s + self.key_s * (first + end) / 2)


def _last_passes() -> dict[bool, deque[tuple[int, float]]]:
    return {drafted: deque(maxlen=COMPARED) for drafted in (False, True)}


@dataclass
class StepCosts:
    """The costs of an engine, in seconds.

    passes: a target pass with drafts and its verdicts, after a short text, by rows. share: the logarithm of a pass
    without drafts over a pass with drafts; weights that fit a processor's cache are still there if no draft model ran
    before. The share is measured where both kinds of passes follow one another. Every pass shows the machine's speed,
    and so the level of both kinds. keys: the time that a long text adds. rest, plain_rest: the rest of a step with
    drafts, and of a step without, for each sequence. drafts: for each method and number of sequences, a draft by depth.
    readings: by method; none = it reads nothing before a draft.
    """

    passes: CostCurve
    drafts: dict[str, dict[int, CostCurve]] = field(default_factory=dict)
    keys: KeyCosts = field(default=KeyCosts())
    readings: Mapping[str, Reading] = field(default_factory=dict)
    share: float = 0.0
    compared: int = 0
    rest: Mean = field(default_factory=Mean)
    plain_rest: Mean = field(default_factory=Mean)
    last: dict[bool, deque[tuple[int, float]]] = field(default_factory=_last_passes)
    tables: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # of `drafts_s`, until the curves change

    def attention(self, rows: Sequence[int], keys: Sequence[int]) -> AttentionSeconds:
        """Return the time that attention adds to a pass, from each sequence's rows without a draft, and its keys."""
        one_s, shares = self.passes.at(1), list[float]()
        for own, length in zip(rows, keys, strict=True):
            shares.append(length * (self.keys.first + (own - 1) * self.keys.further))
        return AttentionSeconds(one_s * sum(shares), one_s * self.keys.further * sum(keys) / max(1, len(keys)))

    def steps_s(self, rows: int, sequences: int, most: int, attention: AttentionSeconds = NO_ATTENTION) -> list[float]:
        """Return the seconds of steps with `rows` and 0 to `most` nodes, without drafting.

        A pass takes at least as long as one without nodes.
        """
        first_s, *passes = self.passes.between(rows, rows + most + 1)
        plain_s = (first_s + attention.plain_s) * math.exp(min(0.0, self.share))
        if attention != NO_ATTENTION:
            passes = list(map(add, passes, count(attention.plain_s + attention.node_s, attention.node_s)))
        rest_s = sequences * max(self.rest.value, self.plain_rest.value)
        return [
            plain_s + sequences * self.plain_rest.value,
            *map(add, repeat(rest_s), map(max, passes, repeat(plain_s))),
        ]

    def draft_s(self, method: str, sequences: int, depth: int) -> float:
        """Return the time to draft to a depth for some sequences; 0 for depth 0, and for a method without curves."""
        return float(self.drafts_s(method, sequences, depth)[sequences, depth])

    def drafts_s(self, method: str, sequences: int, depth: int) -> np.ndarray[Any, Any]:
        """Return the times to draft for 0 to at least `sequences` sequences, to the depths 0 to at least `depth`."""
        found = self.tables.get(method, _NO_TABLE)
        if found.shape[0] <= sequences or found.shape[1] <= depth:
            found = self._interpolate(method, max(sequences, found.shape[0]), max(depth, found.shape[1]))
            self.tables[method] = found
        return found

    def _interpolate(self, method: str, sequences: int, depth: int) -> np.ndarray[Any, Any]:
        """Return the times [sequences + 1, depth + 1] of drafts."""
        found, curves = np.zeros((sequences + 1, depth + 1)), self.drafts.get(method)
        if curves:
            counts = sorted(curves)
            rows = np.array([curves[count].between(1, depth + 1) for count in counts])
            places = np.arange(1, sequences + 1)
            after = np.clip(np.searchsorted(counts, places), 1, max(1, len(counts) - 1))
            if len(counts) == 1:
                found[1:, 1:] = rows[0]
            else:
                few, many = np.array(counts)[after - 1], np.array(counts)[after]
                share = ((places - few) / (many - few))[:, None]
                found[1:, 1:] = np.maximum(rows[after - 1], rows[after - 1] + share * (rows[after] - rows[after - 1]))
        return found

    def observe_draft(self, method: str, sequences: int, depth: int, seconds: float) -> None:
        """Follow a draft of one method that took `seconds`."""
        curves = self.drafts.get(method)
        if curves and depth:
            nearest = sequences
            if sequences not in curves:
                nearest = min(curves, key=lambda count: abs(count - sequences))
                seconds *= curves[nearest].at(depth) / self.draft_s(method, sequences, depth)
            curves[nearest].observe(depth, seconds)
            self.tables.pop(method, None)

    def observe_step(self, step: int, rows: int, sequences: int, timing: StepTiming, attention_s: float) -> None:
        """Follow a step with drafts, whose attention was expected to take attention_s. step: its number.

        A deviation from the expected time is shared in proportion with attention.
        """
        short_s = self.passes.at(rows)
        self._compare(step, True, timing.verify_s / (short_s + attention_s))
        self.passes.observe(rows, timing.verify_s * short_s / (short_s + attention_s))
        self.rest.add(timing.rest_s / sequences)

    def observe_plain(
        self, step: int, rows: int, sequences: int, timing: StepTiming, attention: AttentionSeconds
    ) -> None:
        """Follow a step without drafts."""
        level = self._compare(step, False, timing.verify_s / (self.passes.at(rows) + attention.plain_s))
        self.passes.level.follow(level - self.share)
        self.plain_rest.add(timing.rest_s / sequences)

    def _compare(self, step: int, drafted: bool, ratio: float) -> float:
        """Compare the last passes of both kinds, if both were near this step; return the level of this one.

        ratio: of its seconds to its expected seconds.
        """
        level = math.log(max(ratio, SMALLEST)) + self.passes.level.value
        own, other = self.last[drafted], self.last[not drafted]
        own.append((step, level))
        for last in (own, other):
            while last and last[0][0] <= step - NEAR:
                last.popleft()
        if other:
            self.compared += 1
            with_drafts, without = self.last[True], self.last[False]
            change = median_low(map(_LEVEL, without)) - median_low(map(_LEVEL, with_drafts)) - self.share
            self.share += max(DRIFT, 1 / self.compared) * min(max(change, -OUTLIER), OUTLIER)
        return level


class Backlogs:
    """How much of each request drafters have processed: one with a cache of its own first computes what it has not.

    After a long prompt, this can take longer than the drafts of a short answer save. The tokens of a source count too:
    the encoder of a draft model reads them before the first draft.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs  # whose readings may be measured later
        self._seen: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def note(self, request: Request) -> int:
        """Record a draft for a request; return how many tokens it gained since its last draft."""
        length = len(request.source) + len(request.tokens)
        count, self._seen[request] = length - self._seen.get(request, 0), length
        return count

    def seconds(self, method: str, request: Request) -> float:
        """Return the seconds of a request's backlog."""
        reading, seen = self._costs.readings.get(method), self._seen.get(request, 0)
        length = len(request.source) + len(request.tokens)
        return 0.0 if reading is None or length - seen < LEAST_BACKLOG else reading.seconds(seen, length)

    def affordable(
        self,
        method: str,
        requests: Sequence[Request],
        counts: Sequence[int],
        token_s: float,
        most_s: float = math.inf,
    ) -> tuple[list[int], float]:
        """Return counts, 0 where a backlog takes longer than `token_s` for each token that a request may still get.

        If those that are left take longer than `most_s` together, only the shortest stays. The number is the seconds of
        the backlogs that stay.
        """
        waits_s = dict[int, float]()
        for place, request in enumerate(requests):
            if counts[place]:
                wait_s, most = self.seconds(method, request), request.params.max_tokens
                gained = request.num_positions - len(request.prompt)
                if wait_s <= token_s * (USUAL_ANSWER if most is None else most - gained):
                    waits_s[place] = wait_s
        if sum(waits_s.values()) > most_s:
            shortest = min(waits_s, key=waits_s.__getitem__)
            waits_s = {shortest: waits_s[shortest]}
        return [each if place in waits_s else 0 for place, each in enumerate(counts)], sum(waits_s.values())
