"""What a live server reports of its requests: the access log, traces, ids in errors, and metrics."""

from __future__ import annotations

import gzip
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from speculant import AsyncEngine
from speculant.errors import ModelError
from speculant.serving import logger as access_logger
from tests.async_engines import core
from tests.integration.serving.test_ends import SlowEngine
from tests.models import Checkpoints, checkpoints
from tests.servers import LiveServer, in_background, serve

__all__ = ["checkpoints", "serve"]
Serve = Callable[..., LiveServer]
BODY: dict[str, Any] = {"prompt": "def f", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Return the lines of the access log."""
    written: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    handler, level = Kept(), access_logger.level
    access_logger.addHandler(handler)
    access_logger.setLevel(logging.INFO)
    yield written
    access_logger.removeHandler(handler)
    access_logger.setLevel(level)


def engine_of(checkpoints: Checkpoints) -> AsyncEngine:
    return AsyncEngine(checkpoints.target, draft_model=checkpoints.near, spec_length=3, max_num_seqs=2)


def logged(server: LiveServer, lines: list[str], path: str = "/v1/completions") -> dict[str, Any]:
    """Wait for the line of the only request to a path."""
    server.until(lambda: any(path in line for line in lines))
    (line,) = [json.loads(line) for line in lines if path in line]
    return dict(line)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line(serve: Serve, checkpoints: Checkpoints, lines: list[str], stream: bool) -> None:
    server = serve(engine_of(checkpoints), access_log="json", api_keys=("secret",)).ready()
    given = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
    response = server.http.post("/v1/completions", json={**BODY, "stream": stream}, headers=given)
    line = logged(server, lines)
    assert (line["status"], line["end"], line["request_id"]) == (200, "complete", "mine")
    assert line["bytes"] == len(response.content)
    assert (line["prompt_tokens"], line["generated_tokens"]) == (len("def f"), 12)
    assert 0 < line["accepted_tokens"] < 12
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert line["client"].startswith("key:")
    assert "secret" not in "".join(lines)


def test_a_response_in_the_background_is_logged_at_its_end(
    serve: Serve, checkpoints: Checkpoints, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection has ended long before; a response that is cancelled has what was generated until then."""
    engine = AsyncEngine(checkpoints.target, chat_template="{% for each in messages %}{{ each.content }}{% endfor %}")
    SlowEngine(engine, monkeypatch)
    server = serve(engine, access_log="json").ready()
    body = {"input": "def f", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True, "background": True}
    server.post("/v1/responses", **body)
    line = logged(server, lines, '/v1/responses"')
    assert (line["status"], line["end"], line["generated_tokens"]) == (200, "complete", 12)
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    lines.clear()
    made = server.post("/v1/responses", **{**body, "max_output_tokens": 60})
    server.post(f"/v1/responses/{made['id']}/cancel")
    line = logged(server, lines, '/v1/responses"')
    assert (line["status"], line["end"]) == (200, "aborted")
    assert line["generated_tokens"] < 60


def test_a_client_that_leaves_is_logged(
    serve: Serve, checkpoints: Checkpoints, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(checkpoints)
    step, next_step = core(engine).step, threading.Semaphore(2)
    monkeypatch.setattr(core(engine), "step", lambda: (next_step.acquire(timeout=30), step())[1])
    server = serve(engine, access_log="json").ready()
    request = server.http.build_request("POST", "/v1/completions", json={**BODY, "max_tokens": 90, "stream": True})
    response = server.http.send(request, stream=True)
    assert next(response.iter_lines()).startswith("data: ")
    response.close()
    line = logged(server, lines)
    next_step.release(1000)
    assert (line["status"], line["end"]) == (200, "disconnected")
    assert 0 < line["generated_tokens"] < 90


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_s_log_line_has_the_request_s_id(
    serve: Serve,
    checkpoints: Checkpoints,
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    engine = engine_of(checkpoints)
    server = serve(engine, access_log="json").ready()
    fails = "speculant.serving.openai.answers.CompletionAnswer." + ("end" if stream else "document")
    monkeypatch.setattr(fails, lambda _: 1 / 0)
    response = server.http.post("/v1/completions", json={**BODY, "stream": stream}, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.status_code == (200 if stream else 500)
    assert "internal_error" in response.text
    line = logged(server, lines)
    assert (line["status"], line["end"], line["request_id"]) == (response.status_code, "error", "mine")
    assert [each.levelname for each in caplog.records if "request mine failed" in each.getMessage()] == ["ERROR"]


def test_an_engine_s_error_names_the_request(
    serve: Serve, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("the logits are not finite", "check the weights.")

    engine = engine_of(checkpoints)
    monkeypatch.setattr("speculant.engine.step.forward_target", fail)
    monkeypatch.setattr(core(engine), "check_target", lambda: None)
    server = serve(engine).ready()
    caplog.set_level(logging.INFO, "speculant.engine.commit")
    for _ in range(2):  # the same id twice
        response = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
        assert response.status_code == 400
    failed = [each.getMessage() for each in caplog.records if each.name == "speculant.engine.commit"]
    assert len(failed) == 2
    assert all(re.match(r"request mine:[0-9a-f]{32}-0 failed", each) for each in failed)


def test_two_requests_may_have_one_id(serve: Serve, checkpoints: Checkpoints) -> None:
    server = serve(engine_of(checkpoints)).ready()
    statuses: list[int] = []

    def send() -> None:
        response = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
        statuses.append(response.status_code)

    with in_background([send] * 6):
        pass
    assert statuses == [200] * 6


# --- traces


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it gets by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        self.server.paths.add(self.path)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_collector_gets_a_request_s_spans(serve: Serve, checkpoints: Checkpoints) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    collector = Collector()
    server = serve(engine_of(checkpoints), otlp_endpoint=collector.url).ready()
    given = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    assert server.http.post("/v1/completions", json={**BODY, "stream": True}, headers=given).status_code == 200
    server.http.get("/metrics")
    server.server.should_exit = True
    server.wait()  # which sends the spans that are left
    collector.stop()
    assert collector.paths == {"/v1/traces"}
    spans = {each.name: each for each in collector.spans}
    assert sorted(spans) == sorted(["llm_request", "queue", "prompt", "draft", "target pass", "verify"])
    root = spans["llm_request"]
    assert {each.trace_id.hex() for each in spans.values()} == {TRACE}
    assert root.parent_span_id.hex() == PARENT
    told = {each.key: each.value for each in root.attributes}
    assert told["gen_ai.request.id"].string_value == "mine"
    assert told["gen_ai.usage.completion_tokens"].int_value == 12
    assert told["speculant.accepted_tokens"].int_value > 0
    seconds = {name: (each.end_time_unix_nano - each.start_time_unix_nano) / 1e9 for name, each in spans.items()}
    assert all(seconds[name] > 0 for name in spans)
    parts = seconds["draft"] + seconds["target pass"] + seconds["verify"]
    assert parts <= told["gen_ai.latency.time_in_model_inference"].double_value < seconds["llm_request"]


# --- metrics


def test_no_client_adds_a_series(serve: Serve, checkpoints: Checkpoints) -> None:
    server = serve(engine_of(checkpoints), metrics_prefix="vllm").ready()

    def series() -> set[str]:
        page = server.http.get("/metrics").text
        return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}

    server.post("/v1/completions", **BODY)
    before = series()
    for given in ({"user": "u"}, {"model": "other"}, {"cache_salt": "s"}, {"metadata": {"a": "b"}}, {"n": 2}):
        server.http.post("/v1/completions", json={**BODY, **given}, headers={"X-Request-Id": "id"})
        server.http.get("/a/path", headers={"User-Agent": "agent"})
    assert {each for each in series() - before if "per_pos" not in each} == set()


def test_a_page_agrees_with_the_engine(serve: Serve, checkpoints: Checkpoints) -> None:
    engine = engine_of(checkpoints)
    server = serve(engine, metrics_prefix="vllm").ready()
    server.post("/v1/completions", **BODY)
    families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}
    (cache,) = families["vllm:cache_config_info"].samples
    inner = core(engine)
    assert int(cache.labels["block_size"]) * int(cache.labels["num_gpu_blocks"]) == inner.free_kv_tokens() > 0
    assert cache.labels["cache_dtype"] == "auto"
    values = {
        each.name: each.value for family in families.values() for each in family.samples if "le" not in each.labels
    }
    steps, prompt = engine.metrics.steps, len("def f")
    assert values["vllm:iteration_tokens_total_count"] == steps > 0
    assert values["vllm:iteration_tokens_total_sum"] == prompt + 12 == engine.metrics.computed_tokens
    assert values["vllm:request_prompt_tokens_sum"] == prompt
    assert values["vllm:request_generation_tokens_sum"] == 12
    assert values["vllm:request_params_max_tokens_sum"] == 12
    inference = values["vllm:request_inference_time_seconds_sum"]
    assert 0 < inference < values["vllm:e2e_request_latency_seconds_sum"]
