"""A server under load: its capacity, then requests at multiples of it, with speculation on and off in turn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from speculant.errors import ConfigError, ServerError
from speculant.lab.bench.http_load import Fields, Load, LoadRun
from speculant.lab.bench.measuring import PLAIN, SPECULATIVE, Notify, Spread, interleave, ratios, spreads
from speculant.lab.bench.report import plain_values
from speculant.lab.bench.workloads import poisson_process

LATE = 0.05  # seconds; one request in a hundred may be sent this late
_WARM_UP = 1.0  # seconds
_MOST_PROBLEMS = 3  # that are listed

Runs = Mapping[str, Sequence[LoadRun]]  # by mode, one per round


@dataclass(frozen=True)
class LoadPlan:
    """The loads to measure.

    loads: arrivals per second, as multiples of the capacity. seconds: of arrivals, in each run. clients: of the closed
    loops, at least the number of requests that the server runs at a time; further ones wait. seed: of arrival times.
    """

    clients: int
    loads: Sequence[float] = (0.5, 1.0, 2.0)
    seconds: float = 10.0
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        named = [("load", load) for load in self.loads]
        for name, value in (*named, *((name, getattr(self, name)) for name in ("clients", "seconds", "rounds"))):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} is no number above 0", f"set {name} above 0, or leave it out.")
        if len(set(self.loads)) < len(self.loads):
            raise ConfigError(f"a load occurs twice in {list(self.loads)}", "name each once.")

    def num_runs(self, modes: int) -> int:
        """Return the number of runs for a number of modes."""
        return self.rounds * modes * (1 + len(self.loads))

    def arrivals(self, rate: float, load: float, number: int) -> list[float]:
        """Return the arrival times of a round at `rate` arrivals per second: the same in every mode."""
        times = poisson_process(rate, f"{self.seed}, load {load:g}, round {number}")
        return list(itertools.takewhile(lambda time: time < self.seconds, times))


@dataclass(frozen=True)
class Level:
    """The runs at one load. rate: arrivals per second."""

    load: float
    rate: float
    runs: Runs

    def identical(self) -> tuple[int, int]:
        """Count the requests that every mode completed, and those whose texts are the same in all modes."""
        same = total = 0
        for runs in zip(*self.runs.values(), strict=True):
            for exchanges in zip(*(run.exchanges for run in runs), strict=True):
                if all(exchange.completed for exchange in exchanges):
                    total += 1
                    same += len({exchange.text for exchange in exchanges}) == 1
        return total, same


@dataclass(frozen=True)
class Measured:
    """The closed loops, and the open ones at each load."""

    capacity: Runs
    levels: Sequence[Level]


def measure_serving(load: Load, modes: Mapping[str, Fields], plan: LoadPlan, notify: Notify) -> Measured:
    """Measure a server in each mode, which is given by fields of its requests.

    The capacity is that of the first mode, in requests per second, as the median of the rounds. So all modes get the
    same requests at the same times. Raises ServerError for a run that completes no request.
    """
    for fields in modes.values():
        _checked(load.closed_loop(fields, plan.clients, min(_WARM_UP, plan.seconds)))
    loops = {f"{mode}, the capacity": partial(_closed_loop, load, fields, plan) for mode, fields in modes.items()}
    capacity = _by_mode(modes, interleave(loops, plan.rounds, notify))
    rate = Spread.of([run.figures()["requests_per_s"] for run in next(iter(capacity.values()))]).median
    arriving = {
        f"{mode}, {multiple:g} x capacity": _arriving(load, fields, plan, multiple, multiple * rate)
        for multiple in plan.loads
        for mode, fields in modes.items()
    }
    found = iter(interleave(arriving, plan.rounds, notify).values())
    levels = [Level(each, each * rate, {mode: next(found) for mode in modes}) for each in plan.loads]
    return Measured(capacity, levels)


def _by_mode(modes: Mapping[str, Fields], runs: Mapping[str, Sequence[LoadRun]]) -> Runs:
    return dict(zip(modes, runs.values(), strict=True))


def _closed_loop(load: Load, fields: Fields, plan: LoadPlan) -> LoadRun:
    return _checked(load.closed_loop(fields, plan.clients, plan.seconds))


def _arriving(load: Load, fields: Fields, plan: LoadPlan, multiple: float, rate: float) -> Callable[[], LoadRun]:
    """Return a function that runs the next round of a load."""
    rounds = itertools.count()
    return lambda: _checked(load.open_loop(fields, plan.arrivals(rate, multiple, next(rounds))))


def _checked(run: LoadRun) -> LoadRun:
    if not run.completed:
        reason = run.problems[0] if run.problems else "its queue was full all the time"
        raise ServerError(f"the server completed no request: {reason}", "correct the request, or see the server's log.")
    return run


def document(measured: Measured, plan: LoadPlan, comparable: bool) -> dict[str, Any]:
    """Return all measurements, as `--json` prints them. comparable: all modes must give the same texts."""
    return {
        "plan": asdict(plan),
        "capacity": _figures(measured.capacity),
        "loads": [_level(level, comparable) for level in measured.levels],
        "notes": list(_notes(measured)),
    }


def _figures(runs: Runs) -> dict[str, Any]:
    figures = {mode: [run.figures() for run in own] for mode, own in runs.items()}
    both = PLAIN in figures and SPECULATIVE in figures
    compared = {f"{SPECULATIVE}/{PLAIN}": ratios(figures[SPECULATIVE], figures[PLAIN])} if both else {}
    return {
        "runs": {mode: plain_values(spreads(own)) for mode, own in figures.items()},
        "ratios": {name: plain_values(each) for name, each in compared.items()},
    }


def _level(level: Level, comparable: bool) -> dict[str, Any]:
    total, same = level.identical()
    compared = comparable and SPECULATIVE in level.runs
    outputs = {"compared": compared, "outputs": total, "identical": {SPECULATIVE: same} if compared else {}}
    return {"load": level.load, "request_rate": level.rate, **_figures(level.runs), "outputs": outputs}


def _notes(measured: Measured) -> Iterator[str]:
    runs = [run for level in measured.levels for own in level.runs.values() for run in own]
    problems = Counter(problem for run in runs for problem in run.problems)
    for problem, count in problems.most_common(_MOST_PROBLEMS):
        yield f"{count} requests failed: {problem}"
    if (late := max(run.figures()["lag_p99_s"] for run in runs)) > LATE:
        yield f"one request in a hundred was sent {late * 1e3:.0f} ms late or later, as this process had no more time"
