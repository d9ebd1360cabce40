"""Ways to run a workload measured in turn, and what their figures come to: medians, quartiles, ratios."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from speculant.bench.runs import Bench, Mode, Run
from speculant.bench.workloads import Workload
from speculant.params import SamplingParams

T = TypeVar("T")
Tell = Callable[[str], None]  # hears the name of each run before it starts

PLAIN, SPECULATIVE = "plain", "speculative"
ONE_AT_A_TIME = "_sequential"  # the end of a mode's name


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
class Case:
    """A workload and its runs: by mode, one of each round.

    The first mode is the one that others are compared with. `params` are the speculative mode's where there is one.
    """

    workload: Workload
    params: SamplingParams
    runs: Mapping[str, Sequence[Run]]

    @property
    def comparable(self) -> bool:
        """Whether all modes must give the same tokens: greedy and seeded ones do."""
        return self.params.greedy or self.params.seed is not None

    @property
    def compared(self) -> list[str]:
        """The modes that are compared with the first."""
        return list(self.runs)[1:]

    @property
    def num_outputs(self) -> int:
        """Outputs of one mode, over all rounds."""
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
        """Return each figure's ratio of two modes."""
        return ratios([run.figures() for run in self.runs[over]], [run.figures() for run in self.runs[under]])


def both_ways(params: SamplingParams, speculating: bool, sequential: bool = False) -> dict[str, Mode]:
    """Return the plain mode and, if there is something to draft with, the speculative one, by name."""
    modes = {PLAIN: Mode(replace(params, speculation=False), sequential)}
    if speculating and params.speculation is not False:
        modes[SPECULATIVE] = Mode(params, sequential)
    return modes


def one_at_a_time(modes: Mapping[str, Mode]) -> dict[str, Mode]:
    """Return the same modes, each prompt starting when the one before is done."""
    return {name + ONE_AT_A_TIME: replace(mode, sequential=True) for name, mode in modes.items()}


def measure(bench: Bench, workload: Workload, modes: Mapping[str, Mode], rounds: int, tell: Tell) -> Case:
    """Run a workload in every mode, once a round; a short run of each comes before and is not counted."""
    for mode in modes.values():
        bench.warm_up(workload, mode)
    runs = interleave({name: partial(bench.run, workload, mode) for name, mode in modes.items()}, rounds, tell)
    return Case(workload, modes.get(SPECULATIVE, modes[PLAIN]).params, runs)


def interleave(
    subjects: Mapping[str, Callable[[], T]], rounds: int, tell: Tell = lambda name: None
) -> dict[str, list[T]]:
    """Run every subject once per round and return the results by subject.

    So a noisy machine hits all alike. Every other round goes backwards: none always comes first.
    """
    results: dict[str, list[T]] = {name: [] for name in subjects}
    for round_ in range(rounds):
        for name in list(subjects)[:: -1 if round_ % 2 else 1]:
            tell(name)
            results[name].append(subjects[name]())
    return results


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return each figure's spread over the rounds; one that a round lacks is left out."""
    return {name: Spread.of([each[name] for each in rounds]) for name in _shared(rounds)}


def ratios(over: Sequence[Mapping[str, float]], under: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of over / under, each taken inside one round; a figure that is 0 below has none."""
    return {
        name: Spread.of([above[name] / below[name] for above, below in zip(over, under, strict=True)])
        for name in _shared([*over, *under])
        if all(below[name] for below in under)
    }


def _shared(rounds: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in rounds[0] if all(name in each for each in rounds)]
