"""The figures: pooled alpha, accepted / drafted, histograms, gaps and percentiles."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from speculant.metrics import (
    EngineMetrics,
    PassTotals,
    RequestMetrics,
    SpeculationMetrics,
    StepTiming,
    TimingMetrics,
    percentile,
)

# (drafted, accepted, tested) of one step
steps_strategy = st.lists(
    st.integers(1, 6).flatmap(
        lambda drafted: st.integers(0, drafted).map(lambda kept: (drafted, kept, kept + (kept < drafted)))
    ),
    max_size=20,
)


def recorded(steps: list[tuple[int, int, int]]) -> SpeculationMetrics:
    metrics = SpeculationMetrics()
    for step in steps:
        metrics.record(*step)
    return metrics


def test_acceptance_rate_of_exact_proportions() -> None:
    """alpha 0.8 and drafts of 5: pooled alpha is 0.8, accepted / drafted only 0.54, tokens per step 3.69."""
    alpha = Fraction(4, 5)
    metrics = SpeculationMetrics()
    for accepted in range(6):
        chance = alpha**accepted * (1 - alpha if accepted < 5 else 1)
        for _ in range(int(chance * 5**5)):
            metrics.record(5, accepted, accepted + (accepted < 5))
    assert metrics.num_spec_steps == 5**5
    assert metrics.acceptance_rate == pytest.approx(0.8, abs=1e-12)
    assert metrics.draft_acceptance_rate == pytest.approx(0.54, abs=0.005)
    assert metrics.mean_acceptance_length == pytest.approx(float((1 - alpha**6) / (1 - alpha)), abs=1e-12)
    assert metrics.mean_acceptance_length == pytest.approx(3.69, abs=0.005)
    assert metrics.acceptance_histogram == [625, 500, 400, 320, 256, 1024]


@given(steps=steps_strategy)
def test_rates_follow_from_the_counts(steps: list[tuple[int, int, int]]) -> None:
    metrics = recorded(steps)
    drafted, accepted, tested = (sum(step[i] for step in steps) for i in range(3))
    assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps == len(steps)
    assert sum(k * count for k, count in enumerate(metrics.acceptance_histogram)) == accepted
    assert metrics.draft_acceptance_rate == (accepted / drafted if steps else 0)
    assert metrics.acceptance_rate == (accepted / tested if steps else 0)
    assert metrics.mean_acceptance_length == (1 + accepted / len(steps) if steps else 1)
    assert metrics.draft_acceptance_rate <= metrics.acceptance_rate <= 1


@given(first=steps_strategy, second=steps_strategy)
def test_pooling_is_recording_everything_together(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]
) -> None:
    pooled, other = recorded(first), recorded(second)
    before = other.to_dict()
    pooled.add(other)
    assert pooled == recorded([*first, *second])
    assert other.to_dict() == before


def test_the_documented_keys_are_there_and_are_json() -> None:
    metrics = RequestMetrics(TimingMetrics(1.0), recorded([(4, 2, 3)]), verification="match")
    told = json.loads(json.dumps(metrics.to_dict()))
    assert set(told) == {"tokens_per_pass", "speculative_decoding", "timing", "cached_tokens", "num_preemptions"}
    assert {
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "acceptance_rate",
    } <= set(told["speculative_decoding"])
    times = {"ttft_s", "decode_s", "tokens_per_s", "target_passes", "draft_s", "verify_s", "itl_s", "burst_s"}
    assert times | {"sampled_passes", "tokens_per_pass"} <= set(told["timing"])


def test_an_engine_s_figures_are_json() -> None:
    told = json.loads(json.dumps(EngineMetrics(steps=4, tokens=10, blocks_total=8).to_dict()))
    assert told["tokens_per_step"] == 2.5
    assert told["blocks_total"] == 8
    assert {"preemptions", "finished", "aborted", "failed", "prompt_tokens", "prefix_hit_tokens"} <= set(told)
    assert {"waiting", "running", "blocks_used", "draft_s", "verify_s", "other_s"} <= set(told)
    assert EngineMetrics().to_dict()["tokens_per_step"] == EngineMetrics().to_dict()["tokens_per_pass"] == 0
    assert EngineMetrics(steps=4, tokens=10, sampled_passes=8).to_dict()["tokens_per_pass"] == 1.25


def test_tokens_of_one_step_arrive_together() -> None:
    timing = TimingMetrics(arrival=10.0)
    assert timing.ttft_s is None
    timing.record_tokens(12.0, 2)
    timing.record_tokens(13.0, 3)
    timing.record_tokens(15.0, 1)
    assert timing.ttft_s == 2.0
    assert timing.gaps == [0.0, 1.0, 0.0, 0.0, 2.0]
    assert timing.pauses == [1.0, 2.0]
    assert timing.to_dict()["burst_s"] == {"p50": 1.0, "p90": 2.0, "p99": 2.0}
    assert (timing.num_tokens, timing.decode_s) == (6, 3.0)
    assert timing.tokens_per_s == 5 / 3


def test_one_token_has_no_rate() -> None:
    timing = TimingMetrics(arrival=0.0)
    timing.record_tokens(1.0, 1)
    assert (timing.tokens_per_s, timing.decode_s) == (0.0, 0.0)
    assert timing.to_dict()["itl_s"] == {"p50": None, "p90": None, "p99": None}


def test_passes_add_up() -> None:
    timing = TimingMetrics(arrival=0.0)
    timing.record_pass(StepTiming(1.0, 1.25, 1.75))
    timing.record_pass(StepTiming(2.0, 2.25, 3.25, passed=2.75))
    assert (timing.target_passes, timing.draft_s, timing.verify_s) == (2, 0.5, 1.5)
    assert timing.pass_s == 1.0, "a pass without a reading takes all of it"


def test_a_request_waits_until_its_first_step() -> None:
    timing = TimingMetrics(arrival=1.0)
    assert (timing.queue_s, timing.prompt_s) == (None, None)
    timing.record_pass(StepTiming(3.0, 3.25, 3.75))
    assert (timing.queue_s, timing.prompt_s) == (2.0, None)
    timing.record_pass(StepTiming(4.0, 4.25, 4.75))
    timing.record_tokens(4.75, 1)
    assert (timing.queue_s, timing.prompt_s) == (2.0, 1.75)


def test_tokens_per_pass_counts_passes_that_gave_tokens() -> None:
    """Two passes process the prompt, and the second gives a token. One of the next 4 passes accepts 4 draft tokens."""
    metrics = RequestMetrics(TimingMetrics(arrival=0.0))
    assert metrics.tokens_per_pass == 0, "there is no pass"
    for number, gained in enumerate((0, 1, 5, 1, 1)):
        metrics.timing.record_pass(StepTiming(number, number, number + 1))
        if gained:
            metrics.timing.record_tokens(number + 1, gained)
            metrics.timing.sampled_passes += 1
    metrics.speculative_decoding.record(4, 4, 4)
    assert (metrics.timing.target_passes, metrics.timing.sampled_passes) == (5, 4)
    assert metrics.tokens_per_pass == metrics.timing.to_dict()["tokens_per_pass"] == 8 / 4
    assert metrics.speculative_decoding.mean_acceptance_length == 5, "it sees the pass with the draft alone"


def samples_of(*steps: dict[int, int], number: int = 3) -> list[RequestMetrics]:
    """Return the metrics of samples after steps of one second; each step gave some samples some tokens."""
    together = PassTotals()
    timings = [TimingMetrics(arrival=0.0, together=together) for _ in range(number)]
    for started, gained in enumerate(steps):
        for sample, tokens in gained.items():
            timings[sample].record_pass(StepTiming(started, started + 0.25, started + 1))
            timings[sample].record_tokens(started + 1, tokens)
            timings[sample].sampled_passes += 1
    return [RequestMetrics(timing, num_preemptions=1) for timing in timings]


def test_pooled_speed_is_all_tokens_over_all_time() -> None:
    """The first sample ends at once: by its time alone, 9 tokens would have taken no time."""
    samples = samples_of({0: 1}, {1: 1, 2: 2}, {1: 3}, {2: 3})
    pooled = RequestMetrics.pooled(samples)
    timing = pooled.timing
    assert (timing.first_token, timing.last_token, timing.num_tokens) == (1, 4, 10)
    assert timing.tokens_per_s == 9 / 3
    assert (timing.target_passes, timing.draft_s, timing.verify_s) == (4, 1.0, 3.0), "steps 0 to 3, each once"
    assert (timing.started, timing.pass_s) == (0, 3.0)
    assert (timing.sampled_passes, pooled.tokens_per_pass) == (5, 2.0)
    assert timing.gaps == [1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]
    assert pooled.num_preemptions == 3
    assert [sample.tokens_per_pass for sample in samples] == [1.0, 2.0, 2.5]


def test_figures_of_one_sample_are_its_own() -> None:
    metrics = RequestMetrics(TimingMetrics(arrival=0.0))
    assert RequestMetrics.pooled([metrics]) is metrics


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([3.0], 50, 3.0),
        ([2.0, 1.0], 50, 1.0),
        ([2.0, 1.0], 51, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0], 50, 2.0),
        ([float(i) for i in range(1, 101)], 90, 90.0),
        ([float(i) for i in range(1, 101)], 99, 99.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([], 50, None),
    ],
)
def test_percentiles_are_by_the_nearest_rank(values: list[float], q: int, expected: float | None) -> None:
    assert percentile(values, q) == expected
