"""Records of requests, the lines that the access log makes of them, and the spans of their traces."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculant import SamplingParams, StreamPiece
from speculant.errors import ConfigError
from speculant.metrics import RequestMetrics, SpeculationMetrics, StepTiming, TimingMetrics
from speculant.serving import (
    API_KEY,
    FORMS,
    RECORD,
    REQUEST_ID,
    USER,
    AccessLog,
    ApiKeys,
    Heads,
    RequestRecord,
    RequestRecords,
    Tracer,
    key_digest,
    note_end,
    phases,
    traces_url,
)
from speculant.types import CompletionOutput, RequestOutput

FIELDS = ["time", "client", "method", "path", "status", "bytes", "seconds", "first_token_seconds", "prompt_tokens",
          "generated_tokens", "accepted_tokens", "end", "request_id"]  # fmt: skip
KEY = "a-secret-key"


async def answering(scope: Scope, _: Receive, send: Send) -> None:
    """Answer with five bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"12", "more_body": True})
    await send({"type": "http.response.body", "body": b"345", "more_body": False})


async def leaving(scope: Scope, _: Receive, send: Send) -> None:
    """End in the middle of a response, as a stream does whose client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"12", "more_body": True})


async def dropping(scope: Scope, receive: Receive, send: Send) -> None:
    await leaving(scope, receive, send)
    note_end(scope, "unread")


async def refusing(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 429, "headers": []})
    await send({"type": "http.response.body", "body": b"full"})


async def generating(scope: Scope, receive: Receive, send: Send) -> None:
    record: RequestRecord = scope[RECORD]
    record.params, record.prompt_tokens = SamplingParams(), 3
    record.count(StreamPiece(0, 5, "a"), record.started + 0.25)
    record.count(StreamPiece(0, 6, "b", drafted=True), record.started + 0.5)
    record.count(StreamPiece(0, None, "", finish_reason="error"), record.started + 0.75)
    await answering(scope, receive, send)


async def failing(_: Scope, __: Receive, send: Send) -> None:
    raise LookupError("a bug")


async def ended(_: Scope, __: Receive, send: Send) -> None:
    raise asyncio.CancelledError


def scope_of(**given: Any) -> dict[str, Any]:
    base = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "headers": [], "client": ("192.0.2.7", 9)}
    return {**base, **given}


def lines(app: ASGIApp, form: str, *scopes: dict[str, Any]) -> list[str]:
    """Return the log's lines for some requests."""
    written: list[str] = []
    whole = RequestRecords(Heads(app), [AccessLog(form, written.append)])

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Message) -> None:
        pass

    async def main() -> None:
        for scope in scopes:
            await whole(scope, receive, send)

    try:
        asyncio.run(main())
    except (LookupError, asyncio.CancelledError):
        assert app in (failing, ended), "only these raise"
    return written


def fields(app: ASGIApp, **given: Any) -> dict[str, Any]:
    (line,) = lines(app, "json", scope_of(**given))
    return dict(json.loads(line))


@pytest.mark.parametrize(
    ("app", "status", "size", "end"),
    [(answering, 200, 5, "complete"), (leaving, 200, 2, "disconnected"), (dropping, 200, 2, "unread"),
     (refusing, 429, 4, "complete"), (failing, 500, 0, "error"), (ended, None, 0, "aborted")],
)  # fmt: skip
def test_a_line_says_how_a_response_ended(app: ASGIApp, status: int | None, size: int, end: str) -> None:
    line = fields(app)
    assert list(line) == FIELDS
    assert (line["status"], line["bytes"], line["end"]) == (status, size, end)
    assert 0 <= line["seconds"] < 60
    assert line["generated_tokens"] is None


def test_a_line_has_the_tokens_of_an_answer() -> None:
    line = fields(generating)
    assert (line["prompt_tokens"], line["generated_tokens"], line["accepted_tokens"]) == (3, 2, 1)
    assert line["first_token_seconds"] == 0.25


def test_a_line_has_the_request_s_id() -> None:
    assert fields(answering, headers=[(b"x-request-id", b"mine-7")])["request_id"] == "mine-7"
    assert re.fullmatch("[0-9a-f]{32}", fields(answering)["request_id"])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_key_is_never_logged(method: str) -> None:
    scope = scope_of(method=method, headers=[(b"authorization", f"Bearer {KEY}".encode())])
    for form in FORMS:
        (line,) = lines(ApiKeys(answering, [KEY]), form, dict(scope))
        assert KEY not in line
        assert re.search(r"key:[0-9a-f]{8}\b", line), line
    assert fields(answering)["client"] == "192.0.2.7"


def test_a_user_is_logged_by_a_digest_beside_the_key() -> None:
    digest = key_digest("anna")
    for keys, client in (([], rf"user:{digest[:8]}"), ([KEY], rf"key:[0-9a-f]{{8}}/user:{digest[:8]}")):
        scope = scope_of(headers=[(b"authorization", f"Bearer {KEY}".encode())], **{USER: digest})
        (line,) = lines(ApiKeys(answering, keys), "text", scope)
        assert re.search(rf" client={client} ", line), line


def test_a_query_is_not_logged() -> None:
    (line,) = lines(answering, "text", scope_of(query_string=b"api_key=secret"))
    assert "secret" not in line


HOSTILE: Sequence[dict[str, Any]] = (
    {"raw_path": b"/x\n2026-01-01 client=admin status=200"},
    {"raw_path": b"/\x1b[31m\x00\r\xff"},
    {"raw_path": b'/" end=complete request_id="x'},
    {"raw_path": b"/" + b"y" * 30_000},
    {"method": "G" * 30_000},
    {"method": "GET status=200"},
    {"headers": [(b"x-request-id", b"x\nend=complete")]},
    {"headers": [(b"x-request-id", b"x" * 129)]},
    {"headers": [(b"x-request-id", b'a="b"\\=c')]},
    {"client": ("fe80::1%eth0\n", 1)},
    {"client": None},
    {"raw_path": None},
)


@pytest.mark.parametrize("given", HOSTILE, ids=lambda given: repr(given)[:40])
def test_nobody_forges_a_line(given: dict[str, Any]) -> None:
    (text,) = lines(answering, "text", scope_of(**given))
    assert [each.partition("=")[0] for each in text.split(" ")] == FIELDS
    assert re.fullmatch(r"[\x21-\x7e]+( [\x21-\x7e]+){12}", text)
    (line,) = lines(answering, "json", scope_of(**given))
    assert line.isascii()
    assert line.isprintable()
    assert list(json.loads(line)) == FIELDS
    assert max(len(text), len(line)) < 1000


def test_nothing_is_recorded_without_a_reader() -> None:
    scope = scope_of()
    asyncio.run(answering(scope, None, _ignore))  # type: ignore[arg-type]
    note_end(scope, "disconnected")
    assert RECORD not in scope
    assert API_KEY not in scope


async def _ignore(_: Message) -> None:
    pass


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


def traced_scope(*headers: tuple[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw, REQUEST_ID: "mine"}


def spans_of(record: RequestRecord, *headers: tuple[str, str]) -> Sequence[Any]:
    """Return the spans that a request gets."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter), "m")
    tracer(traced_scope(*headers), record)
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
        tracer(traced_scope(), record_of())
    began = time.perf_counter()
    tracer.close()
    assert time.perf_counter() - began < 15
