"""The page of metrics: vLLM's names, kinds and labels, and what gateways read of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from speculant import SamplingParams, StreamPiece
from speculant.errors import RequestError, SpeculantError
from speculant.metrics import EngineMetrics, RequestMetrics, StepTiming, TimingMetrics
from speculant.serving import RequestMeter, ServerMetrics, refusal, token_buckets
from speculant.types import CompletionOutput, RequestOutput

CACHE = {"block_size": "16", "num_gpu_blocks": "4", "cache_dtype": "int8", "enable_prefix_caching": "True"}
PARAMS = SamplingParams(max_tokens=7)
BASE = {"model_name": "m", "engine": "0"}


def shown(metrics: ServerMetrics) -> str:
    return metrics.page()[0].decode()


def families(page: str) -> dict[str, Metric]:
    """Return the metrics of a page by name; each is there once."""
    found = list(text_string_to_metric_families(page))
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def value(page: str, name: str, **labels: str) -> float:
    """Return the value of one sample."""
    samples = [sample for family in families(page).values() for sample in family.samples]
    (found,) = [each.value for each in samples if each.name == name and each.labels == {**BASE, **labels}]
    return found


def ended(tokens: int, prompt: int = 10, cached: int = 4) -> RequestOutput:
    """Return the result of a prompt that waited 2 s, got its first token 1 s later and the others in 3 s."""
    timing = TimingMetrics(arrival=100.0)
    timing.record_pass(StepTiming(102.0, 102.25, 103.0, passed=102.75))
    timing.record_tokens(103.0, 1)
    timing.record_tokens(106.0, tokens - 1)
    metrics = RequestMetrics(timing, cached_tokens=cached)
    sample = CompletionOutput(0, "text", list(range(tokens)), "length", metrics=metrics)
    return RequestOutput("r", None, list(range(prompt)), [sample], True, metrics)


def test_metrics_have_vllm_s_names_after_a_prefix() -> None:
    totals = EngineMetrics(tokens=7, sampled_passes=4, blocks_total=4, blocks_used=1, running=2)
    totals.count_draft(4, 3)
    totals.count_draft(2, 0)
    page = shown(ServerMetrics("vllm", "m", lambda: totals))
    for line in (
        'vllm:generation_tokens_total{engine="0",model_name="m"} 7.0',
        'vllm:generation_passes_total{engine="0",model_name="m"} 4.0',
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 6.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 3.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
    ):
        assert f"\n{line}\n" in page
    assert 'position="3"' not in page
    assert "vllm:num_requests_waiting" in shown(ServerMetrics("vllm", "m", lambda: None))


VLLM_KINDS = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
              "lora_requests_info", "gpu_cache_usage_perc"),
    "counter": ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions", "request_success",
                "prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
                "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    "histogram": ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
                  "time_per_output_token_seconds", "request_time_per_output_token_seconds",
                  "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                  "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
                  "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
                  "request_prefill_kv_computed_tokens", "iteration_tokens_total"),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["speculant", "vllm"])
def test_vllm_s_metric_names_are_listed_too(prefix: str) -> None:
    totals = EngineMetrics(tokens=7, blocks_total=4, blocks_used=1, running=2)
    totals.count_draft(4, 3)
    metrics = ServerMetrics(prefix, "m", lambda: totals, lambda: CACHE, lambda: 1024)
    RequestMeter(metrics, 1, PARAMS).record(0, StreamPiece(0, 5, "a"))
    page = shown(metrics)
    found = families(page)
    for kind, names in VLLM_KINDS.items():
        for name in names:
            assert found[f"vllm:{name}"].type == kind
            assert found[f"vllm:{name}"].samples
            assert f"{prefix}:{name}" in found
    assert value(page, "vllm:generation_tokens_total") == 7
    assert value(page, "vllm:time_to_first_token_seconds_count") == 1
    assert ("vllm:generation_passes" in found) == (prefix == "vllm")
    own = [line for line in page.splitlines() if line.startswith(f"{prefix}:")]
    assert len(own) == len(set(own)) > 50


def test_labels_are_vllm_s() -> None:
    metrics = ServerMetrics("vllm", "m", EngineMetrics, lambda: CACHE, lambda: 1024)
    for family in families(shown(metrics)).values():
        for sample in family.samples:
            if family.name == "vllm:lora_requests_info":
                assert set(sample.labels) == {"max_lora", "waiting_lora_adapters", "running_lora_adapters"}
            elif family.name == "vllm:cache_config_info":
                assert sample.labels == {**CACHE, "engine": "0"}
            else:
                assert sample.labels.items() >= BASE.items()


def test_a_prefix_in_a_model_s_name_stays() -> None:
    page = shown(ServerMetrics("own", "own:m", EngineMetrics))
    assert '\nvllm:num_requests_running{engine="0",model_name="own:m"} 0.0\n' in page


def test_buckets_of_tokens_end_at_the_context() -> None:
    assert token_buckets(1024) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert token_buckets(1) == [1]
    metrics = ServerMetrics("vllm", "m", EngineMetrics, longest=lambda: 64)
    (family,) = [each for name, each in families(shown(metrics)).items() if name == "vllm:request_prompt_tokens"]
    bounds = [each.labels["le"] for each in family.samples if each.name.endswith("_bucket")]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf"]
    assert "request_prompt_tokens" not in shown(ServerMetrics("vllm", "m", lambda: None)), "there is no context yet"


def test_a_meter_counts_ended_and_aborted_samples() -> None:
    metrics = ServerMetrics("speculant", "m", lambda: None)
    with suppress(GeneratorExit), RequestMeter(metrics, 3, PARAMS) as meter:
        meter.record(0, StreamPiece(0, 5, "a"))
        meter.record(0, StreamPiece(0, 6, "b", finish_reason="stop"))
        meter.record(0, StreamPiece(1, 5, "a"))
        raise GeneratorExit
    page = shown(metrics)
    assert value(page, "speculant:request_success_total", finished_reason="stop") == 1
    assert value(page, "speculant:request_success_total", finished_reason="abort") == 2
    assert value(page, "speculant:time_to_first_token_seconds_count") == 2
    assert value(page, "speculant:inter_token_latency_seconds_count") == 1


@pytest.mark.parametrize(
    ("error", "begun", "errors"),
    [(refusal("no"), False, 0), (RequestError("no", "fix"), False, 0), (refusal("no"), True, 2),
     (SpeculantError("no", "fix"), False, 2), (ValueError(), False, 2)],
    ids=["refused", "refused by the engine", "refused too late", "failed", "unknown"],
)  # fmt: skip
def test_a_refused_request_has_no_samples(error: Exception, begun: bool, errors: int) -> None:
    metrics = ServerMetrics("speculant", "m", lambda: None)
    with suppress(type(error)), RequestMeter(metrics, 2, PARAMS) as meter:
        if begun:
            meter.record(0, StreamPiece(0, 5, "a"))
        raise error
    page = shown(metrics)
    assert value(page, "speculant:request_success_total", finished_reason="error") == errors
    assert value(page, "speculant:request_success_total", finished_reason="abort") == 0


def test_a_sample_that_fails_at_once_has_no_first_token() -> None:
    metrics = ServerMetrics("speculant", "m", lambda: None)
    RequestMeter(metrics, 1, PARAMS).record(0, StreamPiece(0, None, "", finish_reason="error"))
    page = shown(metrics)
    assert value(page, "speculant:request_success_total", finished_reason="error") == 1
    assert value(page, "speculant:time_to_first_token_seconds_count") == 0


def test_an_ended_sample_is_measured() -> None:
    metrics = ServerMetrics("vllm", "m", EngineMetrics, longest=lambda: 1024)
    output = ended(tokens=4)
    RequestMeter(metrics, 1, PARAMS).record(0, StreamPiece(0, 5, "a", finish_reason="length", output=output))
    page = shown(metrics)
    sums = {
        "request_queue_time_seconds": 2, "request_prefill_time_seconds": 1, "request_decode_time_seconds": 3,
        "request_inference_time_seconds": 4, "request_time_per_output_token_seconds": 1, "request_prompt_tokens": 10,
        "request_generation_tokens": 4, "request_max_num_generation_tokens": 4, "request_params_n": 1,
        "request_params_max_tokens": 7, "request_prefill_kv_computed_tokens": 6,
    }  # fmt: skip
    assert {name: value(page, f"vllm:{name}_sum") for name in sums} == sums
    assert {value(page, f"vllm:{name}_count") for name in sums} == {1}


def test_a_sample_without_tokens_has_no_times() -> None:
    metrics = ServerMetrics("vllm", "m", EngineMetrics, longest=lambda: 1024)
    failed = RequestMetrics(TimingMetrics(arrival=0.0))
    sample = CompletionOutput(0, "", [], "error", metrics=failed)
    output = RequestOutput("r", None, [1, 2], [sample], True, failed, error="it broke")
    metrics.observe(output, SamplingParams(n=1, max_tokens=None))
    page = shown(metrics)
    for name in ("queue", "prefill", "decode", "inference"):
        assert value(page, f"vllm:request_{name}_time_seconds_count") == 0
    assert value(page, "vllm:request_params_max_tokens_count") == 0
    assert value(page, "vllm:request_generation_tokens_count") == 1


def test_steps_are_counted_by_their_tokens() -> None:
    totals = EngineMetrics()
    for tokens in (0, 1, 8, 9, 20_000):
        totals.count_step(tokens)
    page = shown(ServerMetrics("vllm", "m", lambda: totals))
    name = "vllm:iteration_tokens_total"
    counts = {bound: value(page, f"{name}_bucket", le=bound) for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")}
    assert counts == {"1.0": 2, "8.0": 3, "16.0": 4, "16384.0": 4, "+Inf": 5}
    assert (value(page, f"{name}_sum"), value(page, f"{name}_count")) == (20_018, 5)


# --- gateways: the endpoint pickers of the Gateway API inference extension and of llm-d, and production-stack's router

GATEWAY_GAUGES = {
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "usage": "vllm:kv_cache_usage_perc",
}
GATEWAY_CACHE = "vllm:cache_config_info", ("block_size", "num_gpu_blocks")
GATEWAY_ADAPTERS = "vllm:lora_requests_info", ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
ROUTER_SAMPLES = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"),
    *("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),
)


@dataclass(frozen=True)
class Endpoint:
    """What a picker knows about a server."""

    waiting: float
    running: float
    usage: float
    cached_positions: int
    adapters: tuple[str, ...]


def scraped(page: str) -> Endpoint:
    """Read a page as pickers do: the only sample of each gauge, and labels as numbers and lists."""
    found = families(page)

    def labels(name: str) -> Mapping[str, str]:
        (sample,) = found[name].samples
        assert found[name].type == "gauge"
        return dict(sample.labels)

    gauges: dict[str, Any] = {}
    for name, metric in GATEWAY_GAUGES.items():
        assert labels(metric) == BASE
        gauges[name] = found[metric].samples[0].value
    cache, adapters = labels(GATEWAY_CACHE[0]), labels(GATEWAY_ADAPTERS[0])
    block_size, blocks = (int(cache[name]) for name in GATEWAY_CACHE[1])
    running, waiting, most = (adapters[name] for name in GATEWAY_ADAPTERS[1])
    named = tuple(name for name in f"{running},{waiting}".split(",") if name)
    assert len(named) <= int(most)
    return Endpoint(**gauges, cached_positions=block_size * blocks, adapters=named)


def picked(pages: Mapping[str, str]) -> str:
    """Return the server with the shortest queue, then with the most room in its cache."""
    known = {name: scraped(page) for name, page in pages.items()}
    return min(known, key=lambda name: (known[name].waiting, known[name].usage * known[name].cached_positions))


def test_a_gateway_picks_the_server_with_room() -> None:
    totals = EngineMetrics(waiting=0, running=2, blocks_used=3, blocks_total=4)
    loads = {
        "queue": replace(totals, waiting=1, blocks_used=0),
        "full": replace(totals, blocks_used=4),
        "room": totals,
    }
    pages = {
        name: shown(ServerMetrics("vllm", "m", partial(replace, load), lambda: CACHE)) for name, load in loads.items()
    }
    assert scraped(pages["room"]) == Endpoint(0, 2, 0.75, 64, ())
    assert picked({name: pages[name] for name in ("queue", "full", "room")}) == "room"
    assert picked({name: pages[name] for name in ("queue", "full")}) == "full"


def test_a_router_reads_the_older_names() -> None:
    totals = EngineMetrics(blocks_used=1, blocks_total=4, prompt_tokens=12, prefix_hit_tokens=8, waiting=3, running=2)
    page = shown(ServerMetrics("vllm", "m", lambda: totals))
    assert [value(page, name) for name in ROUTER_SAMPLES] == [2, 3, 0.25, 8, 12]
