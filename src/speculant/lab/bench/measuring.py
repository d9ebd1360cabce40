"""Runs a workload in several modes, in turn, and summarises the figures: medians, quartiles, ratios."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from speculant.lab.bench.runs import Bench, BenchRun, Mode
from speculant.lab.bench.workloads import Workload
from speculant.params import SamplingParams

T = TypeVar("T")
Notify = Callable[[str], None]  # called with the name of each run before it starts
Tell = Callable[[str], None]  # called with a line about the results so far

PLAIN, SPECULATIVE = "plain", "speculative"
ONE_AT_A_TIME = "_sequential"  # suffix of a mode's name


@dataclass(frozen=True)
class Spread:
    """The quartiles of a figure over the rounds."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Way:
    """A mode, and the engine that runs it; several ways may share one `Bench`."""

    bench: Bench
    mode: Mode


@dataclass(frozen=True)
class BenchCase:
    """A workload and its runs by mode (the name of a `Way`), one per round.

    The others are compared with the first mode. `params` are those of the speculative mode if there is one.
    """

    workload: Workload
    params: SamplingParams
    runs: Mapping[str, Sequence[BenchRun]]

    @property
    def comparable(self) -> bool:
        """Whether all modes must give the same tokens: greedy and seeded ones do."""
        return self.params.greedy or self.params.seed is not None

    @property
    def num_rounds(self) -> int:
        """How often each mode has run."""
        return len(next(iter(self.runs.values())))

    @property
    def compared(self) -> list[str]:
        """The modes that are compared with the first."""
        return list(self.runs)[1:]

    @property
    def num_outputs(self) -> int:
        """The number of outputs of one mode, over all rounds."""
        return sum(len(run.outputs) for run in next(iter(self.runs.values())))

    def num_identical(self, mode: str) -> int:
        """Count the outputs of a mode that have the same tokens as the first mode's of the same round."""
        first = next(iter(self.runs.values()))
        pairs = zip(
            itertools.chain(*(run.outputs for run in self.runs[mode])),
            itertools.chain(*(run.outputs for run in first)),
            strict=True,
        )
        return sum(mine == other for mine, other in pairs)

    def spreads(self, mode: str) -> dict[str, Spread]:
        """Return each figure's spread over the rounds."""
        return spreads([run.figures() for run in self.runs[mode]])

    def ratios(self, over: str, under: str) -> dict[str, Spread]:
        """Return the spread of each figure's ratio of two modes."""
        return ratios([run.figures() for run in self.runs[over]], [run.figures() for run in self.runs[under]])


def both_ways(params: SamplingParams, speculating: bool, sequential: bool = False) -> dict[str, Mode]:
    """Return the plain mode and, if there is a drafter, the speculative one, by name."""
    modes = {PLAIN: Mode(replace(params, speculation=False), sequential)}
    if speculating and params.speculation is not False:
        modes[SPECULATIVE] = Mode(params, sequential)
    return modes


def base_of(mode: str) -> str:
    """Return the plain mode with which a mode is compared: one at a time if the mode is."""
    return PLAIN + (ONE_AT_A_TIME if mode.endswith(ONE_AT_A_TIME) else "")


def ways_of(bench: Bench, modes: Mapping[str, Mode]) -> dict[str, Way]:
    """Return the modes of one engine as ways."""
    return {name: Way(bench, mode) for name, mode in modes.items()}


def one_at_a_time(modes: Mapping[str, Mode]) -> dict[str, Mode]:
    """Return the same modes with one prompt at a time."""
    return {name + ONE_AT_A_TIME: replace(mode, sequential=True) for name, mode in modes.items()}


def measure(
    ways: Mapping[str, Way], workload: Workload, rounds: int, notify: Notify, tell: Tell = lambda result: None
) -> BenchCase:
    """Run a workload in every way once per round, after a short warm-up run of each that does not count.

    tell: called with a line of the medians so far, after each round but the last.
    """
    for way in ways.values():
        way.bench.warm_up(workload, way.mode)
    params = ways.get(SPECULATIVE, ways[PLAIN]).mode.params
    subjects = {name: partial(way.bench.run, workload, way.mode) for name, way in ways.items()}

    def end_round(runs: Mapping[str, Sequence[BenchRun]]) -> None:
        case = BenchCase(workload, params, runs)
        if case.num_rounds < rounds:
            tell(f"after {case.num_rounds} of {rounds} rounds: {medians(case)}")

    return BenchCase(workload, params, interleave(subjects, rounds, notify, end_round))


def medians(case: BenchCase) -> str:
    """Return the speed of the first mode and those of the others over it, in one line."""
    first = next(iter(case.runs))
    parts = [f"{first} {case.spreads(first)['tokens_per_s'].median:,.0f} tokens/s"]
    speeds = {mode: case.ratios(base_of(mode), mode).get("itl_mean_s") for mode in case.compared}
    parts += [f"{mode} {speed.median:.2f} times its speed" for mode, speed in speeds.items() if speed is not None]
    return ", ".join(parts)


def interleave(
    subjects: Mapping[str, Callable[[], T]],
    rounds: int,
    notify: Notify = lambda name: None,
    end_round: Callable[[Mapping[str, Sequence[T]]], None] = lambda results: None,
) -> dict[str, list[T]]:
    """Run every subject once per round and return the results by subject.

    So noise of the machine affects all of them alike. Every other round runs backwards, so none is always first.
    end_round: called with the results so far after each round.
    """
    results: dict[str, list[T]] = {name: [] for name in subjects}
    for round_ in range(rounds):
        for name in list(subjects)[:: -1 if round_ % 2 else 1]:
            notify(name)
            results[name].append(subjects[name]())
        end_round(results)
    return results


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return each figure's spread over the rounds; a figure that is missing in a round is left out."""
    return {name: Spread.of([each[name] for each in rounds]) for name in _shared(rounds)}


def ratios(over: Sequence[Mapping[str, float]], under: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of over / under, taken per round; a figure that is 0 in `under` is left out."""
    return {
        name: Spread.of([above[name] / below[name] for above, below in zip(over, under, strict=True)])
        for name in _shared([*over, *under])
        if all(below[name] for below in under)
    }


def _shared(rounds: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in rounds[0] if all(name in each for each in rounds)]
