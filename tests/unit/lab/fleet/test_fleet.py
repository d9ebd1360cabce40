"""The simulator against queueing theory, and rules that hold for every fleet."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from speculant.errors import ConfigError
from speculant.lab.fleet.config import FleetConfig, ReplicaLimits, Scaling, TrafficConfig
from speculant.lab.fleet.fleet import FleetRun, figures, simulate_fleet
from speculant.lab.fleet.replica import EngineCosts
from speculant.lab.fleet.traffic import Arrival, arrivals
from speculant.lab.theory.speedup import VerificationCurve

FLAT = EngineCosts(VerificationCurve((1, 2), (0.1, 0.1)))  # each step takes a tenth of a second
SLOPED = EngineCosts(VerificationCurve((1, 8, 64, 512), (0.02, 0.022, 0.04, 0.2)), (0.8,), 0.05)
ONE = ReplicaLimits(max_num_seqs=1)
EIGHT = ReplicaLimits()
BUSY = TrafficConfig(rate=20, requests=1200, prompt_tokens=300, answer_tokens=60, answer_variation=0.5)
SHARED = replace(BUSY, prefixes=200, prefix_tokens=256)


def _run(config: FleetConfig, traffic: TrafficConfig, costs: EngineCosts = SLOPED, **limits: Any) -> FleetRun:
    return simulate_fleet(config, costs, replace(EIGHT, **limits), arrivals(traffic, "traffic"))


def _figures(*arguments: Any, **limits: Any) -> dict[str, Any]:
    return figures(_run(*arguments, **limits))


@pytest.mark.parametrize("load", [pytest.param(0.5, marks=pytest.mark.slow), 0.8])
def test_one_at_a_time_waits_like_m_d_1(load: float) -> None:
    """An answer of one token takes a step: Pollaczek-Khinchine, load x service / 2 (1 - load)."""
    traffic = [Arrival(each.seconds, 8, 1) for each in arrivals(TrafficConfig(load / 0.1, 20_000), "queue")]
    seen = figures(simulate_fleet(FleetConfig(), FLAT, ONE, traffic))["answer_mean_s"]
    assert seen == pytest.approx(0.1 + load * 0.1 / (2 * (1 - load)), rel=0.06)


@pytest.mark.slow  # as long as all the quick tests of queues
def test_random_service_waits_like_m_g_1() -> None:
    """Geometric answers of mean 4 tokens: E[S^2] load / (2 E[S] (1 - load)), with E[S^2] = (2 - p) / p^2 steps."""
    rng, load, p = random.Random(0), 0.7, 0.25
    answers = []
    for each in arrivals(TrafficConfig(load / 0.4, 24_000), "queue"):
        tokens = 1
        while rng.random() >= p:
            tokens += 1
        answers.append(Arrival(each.seconds, 8, tokens))
    waiting = 0.1 * (2 - p) / p**2 / 4 * load / (2 * (1 - load))
    seen = figures(simulate_fleet(FleetConfig(), FLAT, ONE, answers))["answer_mean_s"]
    assert seen == pytest.approx(0.4 + waiting, rel=0.08)


@pytest.mark.slow
def test_random_routing_splits_into_equal_queues() -> None:
    """Each of four replicas is an M/D/1 queue with a quarter of the arrivals."""
    traffic = [Arrival(each.seconds, 8, 1) for each in arrivals(TrafficConfig(28, 24_000), "queue")]
    seen = figures(simulate_fleet(FleetConfig(4, "random"), FLAT, ONE, traffic))["answer_mean_s"]
    assert seen == pytest.approx(0.1 + 0.7 * 0.1 / (2 * 0.3), rel=0.06)


def test_a_lone_request_takes_its_steps() -> None:
    """300 prompt tokens in chunks of 128, then drafts of 3 tokens that are all accepted."""
    costs = replace(SLOPED, rates=(1.0,), cost_ratio=0.0, step_s=0.01, admit_s=0.03, request_s=0.5)
    limits = ReplicaLimits(max_num_batched_tokens=128, draft_length="3")
    run = simulate_fleet(FleetConfig(), costs, limits, [Arrival(1.0, 300, 10)])

    def step(rows: int) -> float:
        return float(costs.seconds.relative([rows])[0]) * 0.02 + 0.01

    first = 0.03 + 2 * step(128) + step(44)
    (request,) = run.requests
    assert request.first_s == pytest.approx(1 + first)
    assert request.end_s == pytest.approx(1 + first + 2 * step(4) + step(1))  # 4 + 4 + 1 tokens after the first
    assert figures(run, costs.request_s)["first_token_p50_s"] == pytest.approx(first + 0.5)
    assert run.busy_s == pytest.approx(request.end_s - 1)


def test_a_drafter_reads_the_prompt_before_its_first_draft() -> None:
    costs = replace(SLOPED, rates=(1.0,), cost_ratio=0.5)
    seen = [
        simulate_fleet(FleetConfig(), costs, ReplicaLimits(draft_length="1"), [Arrival(0.0, prompt, 3)]).requests[0]
        for prompt in (8, 64)
    ]
    gaps = [(each.end_s or 0) - (each.first_s or 0) for each in seen]
    assert gaps[1] - gaps[0] == pytest.approx(0.5 * (0.04 - 0.022))


def test_prompt_rows_may_cost_less_than_verified_ones() -> None:
    costs = replace(SLOPED, prompt_share=0.125)
    (request,) = simulate_fleet(FleetConfig(), costs, EIGHT, [Arrival(0.0, 512, 1)]).requests
    assert request.first_s == pytest.approx(0.04)  # as long as 64 rows


def test_auto_drafts_less_where_rows_cost_time() -> None:
    idle, busy = (_figures(FleetConfig(), replace(BUSY, rate=rate, requests=400)) for rate in (0.2, 8))
    assert idle["mean_draft"] > busy["mean_draft"] + 0.5
    assert _figures(FleetConfig(), BUSY, draft_length="0")["mean_draft"] == 0


def test_auto_is_nearly_as_fast_as_the_best_fixed_length() -> None:
    burst = replace(BUSY, rate=1000, requests=300)
    fixed = [_figures(FleetConfig(), burst, draft_length=str(length))["seconds"] for length in range(1, 7)]
    assert _figures(FleetConfig(), burst)["seconds"] <= 1.05 * min(fixed)


def test_drafts_commit_the_expected_tokens() -> None:
    """(1 - alpha^4) / (1 - alpha) tokens a step with drafts of 3, whether or not alpha varies around 0.8."""
    long = TrafficConfig(rate=1, requests=50, prompt_tokens=16, answer_tokens=4000)
    run = _run(FleetConfig(50, "least"), long, draft_length="3")
    tokens = sum(each.arrival.answer - 1 for each in run.requests) / sum(each.steps for each in run.requests)
    assert tokens == pytest.approx((1 - 0.8**4) / 0.2, rel=0.01)


CHAOS = FleetConfig(
    6, "prefix-bounded", stale_s=0.5, failure_s=60, lose=2, lose_at=20, start_s=5, detect_s=1, retries=3,
    retry_s=0.1, timeout_s=3, scaling=Scaling(3, 9, target=6, up_s=3, down_s=10),
)  # fmt: skip


def test_every_request_ends_once() -> None:
    traffic = arrivals(SHARED, "traffic")
    run = simulate_fleet(CHAOS, SLOPED, EIGHT, traffic)
    assert [each.arrival for each in run.requests] == traffic
    for each in run.requests:
        assert each.end_s is not None, each
        assert (each.error is None) == (each.first_s is not None and each.replica is None and each.tries > 0) or (
            each.first_s is not None
        )
        assert each.tries <= CHAOS.retries + 1
    seen = figures(run)
    assert seen["retries"] > 0
    assert seen["failures"] > 2
    assert seen["refused"] > 0
    assert seen["timeouts"] > 0
    assert 0 < seen["errors"] < 0.2 * len(traffic)
    assert 0 < seen["utilisation"] < 1


def test_equal_seeds_give_equal_runs() -> None:
    few = replace(SHARED, requests=400)
    first, again = (_figures(CHAOS, few) for _ in range(2))
    assert first == again
    assert _figures(replace(CHAOS, seed=1), few) != first


def test_knowing_loads_shortens_answers() -> None:
    random_s, two_s, least_s = (
        _figures(FleetConfig(4, routing), BUSY)["answer_mean_s"] for routing in ("random", "two", "least")
    )
    assert least_s < 0.97 * random_s
    assert two_s < random_s
    assert least_s <= 1.01 * two_s


def test_old_loads_make_least_loaded_a_herd() -> None:
    fresh, old = (_figures(FleetConfig(16, "least", stale_s=age), replace(BUSY, rate=60)) for age in (0.0, 2.0))
    assert old["first_token_p99_s"] > 2 * fresh["first_token_p99_s"]
    two = _figures(FleetConfig(16, "two", stale_s=2.0), replace(BUSY, rate=60))
    assert two["first_token_p99_s"] < old["first_token_p99_s"]


@pytest.mark.parametrize("routing", [pytest.param("prefix", marks=pytest.mark.slow), "prefix-bounded"])
def test_prefix_routing_raises_the_hit_rate(routing: str) -> None:
    config = FleetConfig(8, "two", threshold=50)
    without, with_ = (_figures(replace(config, routing=name), SHARED) for name in ("two", routing))
    assert with_["hit_rate"] > without["hit_rate"] + 0.1
    assert with_["router_entries"] >= 150
    assert without["router_entries"] == 0
    assert _figures(replace(config, routing=routing), SHARED, prefix_caching=False)["hit_rate"] == 0


def test_pure_affinity_overloads_the_hot_prefix_s_replica() -> None:
    hot = replace(SHARED, prefixes=20, zipf=2.0, rate=30)
    pure, bounded = (
        _figures(FleetConfig(8, "prefix-bounded", threshold=threshold), hot)["first_token_p99_s"]
        for threshold in (1e9, 2)
    )
    assert bounded < 0.5 * pure


def test_small_caches_evict_prefixes() -> None:
    large, small = (_figures(FleetConfig(), replace(SHARED, rate=4), kv_tokens=size) for size in (200_000, 4096))
    assert small["hit_rate"] < 0.7 * large["hit_rate"]


def test_failures_are_retried_before_the_first_token() -> None:
    config = FleetConfig(4, lose=2, lose_at=30, start_s=10, retries=5)
    run = _run(config, BUSY)
    failed = [each for each in run.requests if each.error is not None]
    assert failed
    assert all(each.first_s is not None for each in failed)
    assert sum(each.tries > 1 for each in run.requests) > 0
    impatient = _run(replace(config, retries=0), BUSY)
    assert sum(each.error is not None for each in impatient.requests) > len(failed)


def test_a_dead_replica_without_load_attracts_requests() -> None:
    config = FleetConfig(8, "least", lose=1, lose_at=10, retries=0)
    quick, slow = (_figures(replace(config, detect_s=after), BUSY)["refused"] for after in (0, 5))
    assert quick == 0
    assert slow > 30  # a fair share of the 100 requests in these seconds would be 12


def test_the_autoscaler_follows_a_surge() -> None:
    surge = replace(BUSY, rate=4, surge_at=60, surge_rate=20)
    scaling = Scaling(1, 8, target=4, up_s=5, down_s=1e9)
    run = _run(FleetConfig(1, scaling=scaling, start_s=10), surge)
    assert 3 <= run.most_replicas <= 8
    fixed = _figures(FleetConfig(1), surge)
    assert figures(run)["first_token_p99_s"] < fixed["first_token_p99_s"] / 2
    assert figures(run)["machine_hours"] < 8 * run.seconds / 3600


def test_the_autoscaler_gives_replicas_back() -> None:
    falls = replace(BUSY, rate=30, surge_at=30, surge_rate=1, requests=1000)
    config = FleetConfig(6, scaling=Scaling(1, 6, target=4, up_s=5, down_s=5))
    assert _figures(config, falls)["machine_hours"] < 0.6 * _figures(FleetConfig(6), falls)["machine_hours"]


def test_a_request_that_never_fits_is_an_error() -> None:
    with pytest.raises(ConfigError, match="kv_tokens=128"):
        _run(FleetConfig(), BUSY, kv_tokens=128)


def test_memory_limits_the_batch() -> None:
    room, little = (_figures(FleetConfig(), BUSY, kv_tokens=size)["answer_mean_s"] for size in (65536, 1024))
    assert little > 1.2 * room


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FleetConfig(0),
        lambda: FleetConfig(routing="nearest"),
        lambda: FleetConfig(failure_s=0),
        lambda: FleetConfig(stale_s=-1),
        lambda: Scaling(3, 2),
        lambda: ReplicaLimits(draft_length="long"),
        lambda: ReplicaLimits(max_num_seqs=9, max_num_batched_tokens=8),
        lambda: TrafficConfig(rate=0),
        lambda: TrafficConfig(prefixes=3),
        lambda: TrafficConfig(surge_at=3),
        lambda: replace(FLAT, rates=(1.5,)),
        lambda: replace(FLAT, step_s=-1),
        lambda: replace(FLAT, rates=(0.5,), spread=0.6),
    ],
)
def test_settings_out_of_range_are_errors(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()
