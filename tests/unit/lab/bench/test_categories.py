"""Figures by category: of that category's prompts alone."""

from __future__ import annotations

import pytest

from speculant.lab.bench import BenchCase, BenchRun, Workload, by_category
from speculant.metrics import SpeculationMetrics, TimingMetrics
from speculant.params import SamplingParams

STEPS, DRAFTED = 10, 4
PARAMS = SamplingParams(temperature=0, max_tokens=40)


def make_run(*requests: tuple[float, int]) -> BenchRun:
    """Return a run of requests by the seconds of a step and the accepted draft tokens of each; 0 = no draft."""
    timings, specs = list[TimingMetrics](), list[SpeculationMetrics]()
    for step_s, accepted in requests:
        timings.append(TimingMetrics(arrival=0.0))
        specs.append(SpeculationMetrics())
        for step in range(STEPS):
            timings[-1].record_tokens(1.0 + step * step_s, 1 + accepted)
            timings[-1].sampled_passes += 1
            if accepted:
                specs[-1].record(DRAFTED, accepted, min(DRAFTED, accepted + 1))
    outputs = [[0] * STEPS * (1 + accepted) for _, accepted in requests]
    return BenchRun(outputs, timings, SpeculationMetrics(), None, 1.0, STEPS, 0.0, 0.0, 0, 0, 1, by_request=specs)


def test_each_category_has_figures_of_its_own() -> None:
    workload = Workload("bench", [[1]] * 3, categories=["easy", "hard", "easy"])
    plain, drafted = make_run((1.0, 0), (1.0, 0), (1.0, 0)), make_run((1.2, 4), (1.2, 1), (1.2, 4))
    found = by_category(BenchCase(workload, PARAMS, {"plain": [plain] * 2, "drafted": [drafted] * 2}))
    assert list(found) == ["easy", "hard"]
    assert [each["prompts"] for each in found.values()] == [2, 1]
    easy, hard = (each["modes"]["drafted"] for each in found.values())
    assert easy["acceptance_rate"]["mean"] == 1.0
    assert hard["acceptance_rate"]["mean"] == pytest.approx(0.5)
    gaps = 5 * STEPS - 1
    assert easy["speed"]["median"] == pytest.approx(gaps / (1.2 * (STEPS - 1)))
    assert hard["speed"]["median"] == pytest.approx((2 * STEPS - 1) / (1.2 * (STEPS - 1)))
    assert easy["tokens_per_pass"]["median"] == pytest.approx(5)
    plain_figures = found["easy"]["modes"]["plain"]
    assert plain_figures["acceptance_rate"] is None
    assert "speed" not in plain_figures


def test_several_samples_of_a_prompt_belong_to_its_category() -> None:
    workload = Workload("bench", [[1], [2]], categories=["easy", "hard"])
    params = SamplingParams(n=2, max_tokens=40)
    runs = {"plain": [make_run(*[(1.0, 0)] * 4)], "drafted": [make_run((1.0, 4), (1.0, 4), (1.0, 1), (1.0, 1))]}
    found = by_category(BenchCase(workload, params, runs))
    rates = [each["modes"]["drafted"]["acceptance_rate"] for each in found.values()]
    assert [rate["mean"] for rate in rates] == [1.0, pytest.approx(0.5)]
    assert [rate["tokens"] for rate in rates] == [2 * STEPS * 4, 2 * STEPS * 2]


def test_prompts_without_categories_have_no_figures() -> None:
    workload = Workload("code", [[1]])
    assert by_category(BenchCase(workload, PARAMS, {"plain": [make_run((1.0, 0))]})) == {}
