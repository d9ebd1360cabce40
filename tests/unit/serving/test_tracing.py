"""The spans of a request: names, times, attributes, and the trace that they belong to."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from speculant import SamplingParams, StreamPiece
from speculant.errors import ConfigError
from speculant.metrics import RequestMetrics, SpeculationMetrics, StepTiming, TimingMetrics
from speculant.serving.access_log import REQUEST_ID, RequestRecord
from speculant.serving.tracing import Tracer, phases, traces_url
from speculant.types import CompletionOutput, RequestOutput

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def result(arrival: float, steps: int) -> RequestOutput:
    """Return the result of a prompt whose steps began 0.5 s after its arrival and took 0.1 + 0.6 + 0.3 s each."""
    timing, spec = TimingMetrics(arrival=arrival), SpeculationMetrics()
    for step in range(steps):
        started = arrival + 0.5 + step
        timing.record_pass(StepTiming(started, started + 0.1, started + 1.0, passed=started + 0.7))
        timing.record_tokens(started + 1.0, 2)
        spec.record(4, 1, 2)
    metrics = RequestMetrics(timing, spec, cached_tokens=3)
    sample = CompletionOutput(0, "", list(range(2 * steps)), "length", metrics=metrics)
    return RequestOutput("r", None, [1, 2, 3, 4], [sample], True, metrics)


def record_of(*outputs: RequestOutput, **given: Any) -> RequestRecord:
    """Return the record of a request that began at 10 s and ended at 20 s."""
    record = RequestRecord(
        started=10.0, time_ns=10**18, params=SamplingParams(max_tokens=9, temperature=0.5), prompt_tokens=4, status=200
    )
    for output in outputs:
        record.count(StreamPiece(0, 5, "a", output=output), 12.0)
    record.finished, record.end = 20.0, "complete"
    for name, value in given.items():
        setattr(record, name, value)
    return record


def scope_of(*headers: tuple[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw, REQUEST_ID: "mine"}


def spans_of(record: RequestRecord, *headers: tuple[str, str]) -> Sequence[Any]:
    """Return the spans that a request gets."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter), "m")
    tracer(scope_of(*headers), record)
    tracer.close()
    return exporter.get_finished_spans()


def test_the_encoder_s_time_is_a_phase_of_its_own() -> None:
    output = result(11.0, 1)
    output.metrics.timing.encode_s = 0.25
    found = {each.name: each for each in phases(record_of(output))}
    assert [*found] == ["queue", "prompt", "encode", "draft", "target pass", "verify"]
    assert found["encode"].ended - found["encode"].started == 0.25
    assert found["draft"].started == found["encode"].ended


def test_phases_add_up() -> None:
    (queue, prompt, draft, target, verify) = phases(record_of(result(11.0, 3)))
    assert (queue.name, queue.started, queue.ended) == ("queue", 11.0, 11.5)
    assert (prompt.name, prompt.started, prompt.ended) == ("prompt", 11.5, 12.5)
    parts = draft, target, verify
    assert [each.name for each in parts] == ["draft", "target pass", "verify"]
    assert [round(each.ended - each.started, 9) for each in parts] == [0.3, 1.8, 0.9]
    assert (draft.started, target.started, verify.started) == (11.5, draft.ended, target.ended)
    assert {each.attributes["speculant.passes"] for each in parts} == {3}
    assert draft.attributes["speculant.drafted_tokens"] == 12
    assert verify.attributes["speculant.accepted_tokens"] == 3


def test_phases_of_several_prompts_are_those_of_the_longest() -> None:
    found = list(phases(record_of(result(11.0, 1), result(12.0, 4), result(13.0, 2))))
    assert (found[0].started, found[2].attributes["speculant.passes"]) == (12.0, 4)


def test_a_request_that_never_began_has_no_phases() -> None:
    assert list(phases(record_of())) == []
    waiting = RequestMetrics(TimingMetrics(arrival=1.0))
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "", [], "error", metrics=waiting)], True, waiting)
    assert list(phases(record_of(output))) == []


def test_a_request_is_one_span_with_its_phases_below() -> None:
    *children, root = spans_of(record_of(result(11.0, 2)))
    assert (root.name, root.kind.name, root.parent) == ("llm_request", "SERVER", None)
    assert [each.name for each in children] == ["queue", "prompt", "draft", "target pass", "verify"]
    assert {each.parent.span_id for each in children} == {root.context.span_id}
    assert (root.start_time, root.end_time) == (10**18, 10**18 + 10 * 10**9)
    assert children[0].start_time == 10**18 + 10**9
    assert all(root.start_time <= each.start_time <= each.end_time <= root.end_time for each in children)
    assert root.resource.attributes["service.name"] == "speculant"


def test_attributes_have_vllm_s_names() -> None:
    *_, root = spans_of(record_of(result(11.0, 2)))
    expected = {
        "gen_ai.request.id": "mine", "gen_ai.request.n": 1, "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.response.model": "m",
        "gen_ai.usage.prompt_tokens": 4, "gen_ai.usage.completion_tokens": 1, "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.e2e": 10.0, "gen_ai.latency.time_to_first_token": 2.0, "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 1.0, "gen_ai.latency.time_in_model_decode": 1.0,
        "gen_ai.latency.time_in_model_inference": 2.0, "http.response.status_code": 200,
        "speculant.drafted_tokens": 8, "speculant.accepted_tokens": 2, "speculant.end": "complete",
    }  # fmt: skip
    assert root.attributes.items() >= expected.items()
    assert root.status.status_code.name == "UNSET"


def test_a_caller_s_trace_is_continued() -> None:
    *children, root = spans_of(record_of(result(11.0, 1)), ("traceparent", f"00-{TRACE}-{PARENT}-01"))
    assert {f"{each.context.trace_id:032x}" for each in (root, *children)} == {TRACE}
    assert f"{root.parent.span_id:016x}" == PARENT


def test_a_caller_s_choice_of_samples_is_kept() -> None:
    assert spans_of(record_of(result(11.0, 1)), ("traceparent", f"00-{TRACE}-{PARENT}-00")) == ()


@pytest.mark.parametrize("given", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "\xff\x00", f"ff-{TRACE}-{PARENT}-01"])
def test_a_broken_trace_id_is_ignored(given: str) -> None:
    *_, root = spans_of(record_of(), ("traceparent", given), ("tracestate", "a=" + "b" * 10_000))
    assert root.parent is None


@pytest.mark.parametrize(("end", "status"), [("error", "ERROR"), ("aborted", "ERROR"), ("disconnected", "UNSET")])
def test_a_failed_request_s_span_says_so(end: str, status: str) -> None:
    (root,) = spans_of(record_of(end=end))
    assert (root.status.status_code.name, root.attributes["speculant.end"]) == (status, end)


def test_only_requests_that_generate_are_traced() -> None:
    assert spans_of(record_of(params=None)) == ()


def test_a_collector_s_url_gets_a_path() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/own/path") == "https://c/own/path"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"speculant\[otel\]"):
        Tracer.to_collector("http://localhost:4318", "m")


@pytest.mark.slow
def test_a_collector_that_is_down_delays_the_end_little() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    tracer = Tracer.to_collector("http://127.0.0.1:9", "m")
    for _ in range(3000):  # more than its queue
        tracer(scope_of(), record_of())
    began = time.perf_counter()
    tracer.close()
    assert time.perf_counter() - began < 15
