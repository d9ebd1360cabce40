"""Early ends of requests and servers: disconnected clients, deadlines, a full queue, SIGTERM, failed engines."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from speculant import AsyncEngine
from speculant.engine import Engine
from speculant.errors import ModelError
from tests.async_engines import assert_nothing_is_held, core
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import opened
from tests.servers import LiveServer, in_background, serve, serve_process

__all__ = ["checkpoints", "serve", "serve_process"]
LONG: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class SlowEngine:
    """Slows an engine's steps down, so that a test can act between them."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.01) -> None:
        self._step, self.seconds, self.failure = core(engine).step, seconds, None
        monkeypatch.setattr(core(engine), "step", self.step)

    def step(self) -> Any:
        time.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        return self._step()


@pytest.fixture
def engine(checkpoints: Checkpoints) -> AsyncEngine:
    return AsyncEngine(checkpoints.target, max_num_seqs=2, max_waiting=2, dtype="float32")


def idle(engine: AsyncEngine) -> bool:
    inner: Engine = core(engine)
    return not inner.has_unfinished()


def first_event(server: LiveServer, **body: Any) -> tuple[Any, Iterator[str]]:
    """Return a response after its first event, and its lines."""
    response = server.http.send(
        server.http.build_request("POST", "/v1/completions", json={"stream": True, **LONG, **body}), stream=True
    )
    assert response.status_code == 200, response.read()
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return response, lines


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_room(
    serve: Any, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    SlowEngine(engine, monkeypatch)
    server = serve(engine).ready()
    if stream:
        response, _ = first_event(server)
        response.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json=LONG, timeout=0.3)
    server.until(lambda: engine.metrics.aborted == 1)
    assert_nothing_is_held(core(engine))
    server.until(lambda: server.state.admission.count == 0)
    assert 'finished_reason="abort",model_name="' in server.http.get("/metrics").text


def test_a_full_queue_refuses_at_once(serve: Any, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowEngine(engine, monkeypatch)
    server = serve(engine).ready()
    running, short = [first_event(server) for _ in range(2)], {**LONG, "max_tokens": 10}
    with in_background([partial(server.post, "/v1/completions", **short)] * 2):
        server.until(lambda: server.state.admission.count == 4)
        refused = server.http.post("/v1/completions", json=LONG)
        assert server.state.admission.count == 4, "it waited until others had ended"
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for response, _ in running:
            response.close()
    assert server.http.post("/v1/completions", json=short).status_code == 200


def test_a_burst_uses_all_free_room(serve: Any, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes up room from its arrival, not from its first step."""
    SlowEngine(engine, monkeypatch, 0.2)
    server = serve(engine).ready()
    statuses: list[int] = []

    def send() -> None:
        statuses.append(server.http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code)

    with in_background([send] * 6):
        pass
    assert sorted(statuses) == [200] * 4 + [429] * 2
    never = server.http.post("/v1/completions", json={**LONG, "n": 5})
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")


def test_deadlines_end_slow_requests(serve: Any, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowEngine(engine, monkeypatch)
    server = serve(engine, queue_timeout=0.3, first_token_timeout=0.6, request_timeout=1.0).ready()
    held = [first_event(server) for _ in range(2)]
    queued = server.http.post("/v1/completions", json=LONG)
    assert (queued.status_code, queued.json()["error"]["code"]) == (503, "queue_timeout")
    events = [line for line in held[0][1] if line.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    server.until(lambda: idle(engine))
    slow.seconds = 0.9
    late = server.http.post("/v1/completions", json=LONG)
    assert late.status_code in (503, 504)
    slow.seconds = 0.0
    server.until(lambda: idle(engine))


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_dropped(
    serve: Any, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AsyncEngine(checkpoints.target, max_num_seqs=16, dtype="float32")
    server = serve(engine, send_timeout=0.3).ready()
    body = json.dumps(
        {**LONG, "prompt": [[5, i] for i in range(16)], "max_tokens": 240, "stream": True, "logprobs": 100}
    )
    with opened(server.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        server.until(lambda: server.state.admission.count > 0)
        server.until(lambda: server.state.admission.count == 0)
        server.until(lambda: "dropped a client" in caplog.text)  # just after its room is free
        server.until(lambda: len(server.server.server_state.connections) == 1)  # the one of `server.http`
    server.until(lambda: idle(engine))


@dies
def test_a_broken_engine_ends_streams_with_an_error(
    serve: Any, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowEngine(engine, monkeypatch)
    server = serve(engine).ready()
    _, lines = first_event(server)
    slow.failure = ZeroDivisionError("secret 0x7f00deadbeef")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert json.loads(events[-1])["error"] == {
        "message": "The engine has failed; this server can't serve requests any more.",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    for response in (server.http.get("/health"), server.http.post("/v1/completions", json=LONG)):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")


def test_nothing_is_served_while_loading(serve: Any, checkpoints: Checkpoints) -> None:
    loads = threading.Event()

    def load() -> AsyncEngine:
        loads.wait(20)
        return AsyncEngine(checkpoints.target)

    server = serve(load)
    for path in ("/health", "/v1/models"):
        response = server.http.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "loading"
    assert server.http.post("/v1/completions", json=LONG).status_code == 503
    assert server.http.get("/version").status_code == 200
    assert "num_requests_running" in server.http.get("/metrics").text
    assert server.said_ready == []
    loads.set()
    server.until(lambda: bool(server.said_ready))
    assert server.http.post("/v1/completions", json=LONG).status_code == 200


def test_a_server_ends_if_the_model_can_t_be_loaded(serve: Any) -> None:
    def load() -> AsyncEngine:
        raise ModelError("there is none", "name another.")

    server = serve(load)
    server.wait()
    assert isinstance(server.state.load_error, ModelError)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_signal_drains_until_the_deadline(
    serve: Any, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    SlowEngine(engine, monkeypatch, 0.005)
    server = serve(engine, drain_timeout=20 if in_time else 0.2).ready()
    _, lines = first_event(server, max_tokens=100)
    server.server.handle_exit(signal.SIGTERM, None)
    with httpx.Client(base_url=server.url, trust_env=False, verify=False) as other:
        draining = other.get("/health")
        assert (draining.status_code, draining.json()["error"]["code"]) == (503, "shutting_down")
        assert other.post("/v1/completions", json=LONG).status_code == 503
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if in_time:
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    else:
        assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    server.wait()


def test_a_failed_row_ends_only_its_request(serve: Any, engine: AsyncEngine) -> None:
    server = serve(engine).ready()
    banned = {str(token): -1e308 for token in range(264)}
    _, lines = first_event(server)
    failed = server.http.post("/v1/completions", json={**LONG, "logit_bias": banned})
    assert failed.status_code == 400
    assert "no token is possible" in failed.json()["error"]["message"].lower()
    assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_the_command_serves_and_drains(serve_process: Any) -> None:
    server = serve_process("demo", "--served-model-name", "m")
    server.until_loaded()
    assert "speculation is on: " in server.messages[-1]
    answer = server.http.post("/v1/completions", json=LONG)
    assert answer.json()["model"] == "m"
    server.signal()
    assert server.wait(20) == 0
    assert "Traceback" not in "".join(server.messages)
