"""The gain of a run: its costs, and the speed that the formula predicts from them."""

from __future__ import annotations

import dataclasses

import pytest

from speculant.config import EngineConfig
from speculant.engine import build_engine
from speculant.lab.bench import BenchRun, Size, gain, gains, memory
from speculant.metrics import SpeculationMetrics, TimingMetrics
from tests.models import Checkpoints

STEPS, DRAFTED, KEPT = 10, 4, 2


def make_run(tokens_per_step: int, step_s: float, draft_s: float = 0.0) -> BenchRun:
    """Return a run of one request; all steps take the same time and commit the same number of tokens."""
    timing, spec = TimingMetrics(arrival=0.0), SpeculationMetrics()
    for step in range(STEPS):
        timing.record_tokens(1.0 + step * step_s, tokens_per_step)
        if draft_s:
            spec.record(DRAFTED, KEPT, KEPT + 1)
    outputs = [[0] * (STEPS * tokens_per_step)]
    return BenchRun(outputs, [timing], spec, None, STEPS * step_s, STEPS, STEPS * draft_s, 0.0, 0, 0, 1)


PLAIN, FAST = make_run(1, 2.0), make_run(3, 3.0, draft_s=0.8)


def test_costs_are_in_steps_of_plain_decoding() -> None:
    """A draft of 4 takes 0.8 s, 0.1 of a plain step for each token; the rest of the step is 2.2 s."""
    found = gain(PLAIN, FAST)
    assert (found["draft_length"], found["cost_ratio"]) == (4.0, pytest.approx(0.1))
    assert found["verification_ratio"] == pytest.approx(1.1)
    tokens = sum((2 / 3) ** k for k in range(5))
    assert found["predicted_speed"] == pytest.approx(tokens / 1.5)
    assert found["best_speed"] >= found["predicted_speed"]
    assert found["best_length"] in (2, 3)


def test_steps_without_a_draft_give_one_token() -> None:
    """Every other step has no draft, so the formula has half of the tokens beyond the first."""
    metrics = SpeculationMetrics()
    for _ in range(5):
        metrics.record(DRAFTED, KEPT, KEPT + 1)
    found = gain(PLAIN, dataclasses.replace(FAST, speculation=metrics))
    tokens = sum((2 / 3) ** k for k in range(5))
    assert found["predicted_speed"] == pytest.approx((1 + 5 / 9 * (tokens - 1)) / 1.5)


def test_each_draft_counts_with_its_length() -> None:
    metrics = SpeculationMetrics()
    for drafted in (1, 5) * 5:
        metrics.record(drafted, min(drafted, 2), min(drafted, 3))
    alpha = 15 / 20
    tokens = sum(1 + sum(alpha**k for k in range(1, drafted + 1)) for drafted in (1, 5)) / 2
    found = gain(PLAIN, dataclasses.replace(FAST, speculation=metrics))
    assert found["predicted_speed"] == pytest.approx(tokens / 1.5)


def test_runs_without_drafts_have_no_gain() -> None:
    assert gain(PLAIN, PLAIN) == {}
    assert gain(dataclasses.replace(PLAIN, timings=[TimingMetrics(0.0)]), FAST) == {}
    assert gains([PLAIN, PLAIN], [FAST, PLAIN]) == [gain(PLAIN, FAST)]


def test_burst_figures_are_those_between_steps() -> None:
    figures = FAST.figures()
    assert figures["burst_p50_s"] == figures["burst_p99_s"] == pytest.approx(3.0)
    assert figures["itl_p50_s"] == 0.0
    assert figures["burst_tokens"] == pytest.approx(29 / 9), "two tokens of the first burst have a gap"
    assert (figures["draft_s"], figures["verify_s"]) == (pytest.approx(8.0), 0.0)


def test_memory_is_that_of_the_draft_model(checkpoints: Checkpoints) -> None:
    runtime = build_engine(EngineConfig(checkpoints.target, checkpoints.near, kernels="reference"))
    parameters = sum(each.numel() for each in runtime.checkpoint.model.parameters())
    assert Size.of(runtime.checkpoint.config).parameters == parameters
    assert memory(EngineConfig(checkpoints.target, checkpoints.near), runtime) == {
        "target_parameters": parameters,
        "draft_parameters": parameters,
        "parameters_share": 1.0,
        "cache_share": 1.0,
    }
    plain = EngineConfig(checkpoints.target, use_speculative_decoding=False)
    assert memory(plain, build_engine(plain))["draft_parameters"] == 0
