"""Medians, ratios inside a round, and the comparison of outputs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculant.config import EngineConfig
from speculant.engine import build_engine
from speculant.lab.bench import (
    Bench,
    BenchCase,
    BenchRun,
    Mode,
    Spread,
    Workload,
    both_ways,
    interleave,
    measure,
    one_at_a_time,
    ratios,
    spreads,
    ways_of,
)
from speculant.metrics import SpeculationMetrics, TimingMetrics
from speculant.params import SamplingParams
from tests.models import Checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=4)
WORKLOAD = Workload("test", [[1], [2]])


def make_run(outputs: Sequence[Sequence[int]], seconds: float = 1.0) -> BenchRun:
    timings = [TimingMetrics(arrival=0.0) for _ in outputs]
    return BenchRun(outputs, timings, SpeculationMetrics(), None, seconds, 4, 0.0, 0.0, 0, 0, 1)


def test_quartiles() -> None:
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0)


def test_rounds_take_turns_forwards_and_backwards() -> None:
    told: list[str] = []
    calls: list[str] = []
    subjects = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    results = interleave(subjects, 3, told.append)
    assert calls == told == list("abccbaabc")
    assert results == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_ratio_is_taken_inside_each_round() -> None:
    over, under = [{"s": 1.0}, {"s": 10.0}, {"s": 3.0}], [{"s": 2.0}, {"s": 5.0}, {"s": 3.0}]
    assert ratios(over, under)["s"].median == 1.0
    assert spreads(over)["s"].median / spreads(under)["s"].median == 1.0
    noisy = [{"s": 100.0}, {"s": 1.0}, {"s": 10.0}], [{"s": 50.0}, {"s": 0.5}, {"s": 5.0}]
    assert ratios(*noisy)["s"] == Spread(2.0, 2.0, 2.0), "noise that hits a round hits both"


def test_a_figure_that_is_missing_or_zero_has_no_ratio() -> None:
    over, under = [{"a": 1.0, "b": 1.0, "c": 0.0}] * 2, [{"a": 0.0, "c": 2.0}, {"a": 1.0, "b": 1.0, "c": 2.0}]
    assert ratios(over, under) == {"c": Spread(0.0, 0.0, 0.0)}
    assert set(spreads(under)) == {"a", "c"}


def test_modes() -> None:
    plain, fast = Mode(SamplingParams(temperature=0, max_tokens=4, speculation=False)), Mode(GREEDY)
    assert both_ways(GREEDY, True) == {"plain": plain, "speculative": fast}
    assert both_ways(GREEDY, False) == {"plain": plain}
    assert both_ways(plain.params, True) == {"plain": plain}
    alone = one_at_a_time(both_ways(GREEDY, True))
    assert list(alone) == ["plain_sequential", "speculative_sequential"]
    assert all(mode.sequential for mode in alone.values())
    assert both_ways(GREEDY, True, sequential=True)["speculative"] == Mode(GREEDY, sequential=True)


def test_differing_outputs_are_counted() -> None:
    plain = [make_run([[1, 2], [3, 4]]), make_run([[1, 2], [3, 4]])]
    other = [make_run([[1, 2], [3, 5]]), make_run([[1, 2], [3, 4]])]
    case = BenchCase(WORKLOAD, GREEDY, {"plain": plain, "speculative": other})
    assert (case.num_identical("speculative"), case.num_outputs) == (3, 4)
    assert case.num_identical("plain") == 4
    assert case.compared == ["speculative"]


@pytest.mark.parametrize(
    ("params", "expected"), [(GREEDY, True), (SamplingParams(seed=1), True), (SamplingParams(), False)]
)
def test_greedy_and_seeded_outputs_can_be_compared(params: SamplingParams, expected: bool) -> None:
    assert BenchCase(WORKLOAD, params, {"plain": [make_run([[1]])]}).comparable is expected


def test_a_case_has_every_mode_in_every_round(checkpoints: Checkpoints) -> None:
    runtime = build_engine(EngineConfig(checkpoints.target, checkpoints.near, dtype="float64"))
    modes, told = both_ways(GREEDY, runtime.drafting), list[str]()
    case = measure(ways_of(Bench(runtime), {**modes, **one_at_a_time(modes)}), WORKLOAD, 2, told.append)
    assert {name: len(runs) for name, runs in case.runs.items()} == dict.fromkeys(told, 2)
    assert len(told) == 8
    assert all(case.num_identical(mode) == case.num_outputs == 4 for mode in case.compared)
    assert case.spreads("plain")["tokens"] == Spread(8, 8, 8)
    assert case.ratios("speculative", "plain")["tokens"].median == 1
