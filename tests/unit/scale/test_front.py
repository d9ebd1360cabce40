"""The application in front of replicas, with its page of metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter as Count, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from speculant import AsyncEngine
from speculant.errors import ConfigError
from speculant.scale import REPLICA, RoutedRequest, make_front
from speculant.serving import (
    OPEN_PATHS,
    InsideRequest,
    ResponseHead,
    ServerOptions,
    joined,
    make_app,
    responses,
    whole_response,
)
from tests.ray_fakes import FakeHandle, FakeReplicas, answering, saying

T = TypeVar("T")
PROMPT = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
ANSWER = {"model": "demo", "input": "Hi", "max_output_tokens": 12, "temperature": 0, "store": False}
STREAMED = {"stream": True}
KEY = (b"authorization", b"Bearer sk-1")
CHANGING = re.compile(rb'"(?:id|item_id|created|created_at|completed_at)": ?(?:"[^"]*"|[0-9.]+)')


class Both:
    """A replica's application, and the front of a fleet of that one replica, in one event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = AsyncEngine("demo", draft_model="demo", max_num_seqs=4, max_model_len=256)
        self.app, self.front, self.handle = self.make()

    def make(self, **options: Any) -> tuple[FastAPI, FastAPI, FakeHandle]:
        """Return the application, a front of it that is ready, and the handle between them."""
        given = ServerOptions(**options)
        app = make_app(self.engine, given, ("demo",))
        page = app.state.service.metrics_page()[0].decode()
        handle = FakeHandle(answering(app), told={"load": [("one", 0), ("two", 3)], "page": [("one", page)]})
        front = make_front(FakeReplicas(handle), given)
        self.run(front.state.server.load())
        return app, front, handle

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns in the event loop of all tests."""
        return self.runner.run(asyncio.wait_for(work, 60))

    def ask(self, app: FastAPI, path: str, **request: Any) -> tuple[ResponseHead, bytes]:
        """Return an application's response."""
        return self.run(whole_response(app, request_to(path, **request)))


def request_to(
    path: str,
    body: Any = None,
    method: str | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    query: bytes = b"",
) -> InsideRequest:
    """Return a request; a body that is no bytes becomes JSON."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sized = (*headers, (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()))
    return InsideRequest(method or ("GET" if body is None else "POST"), path, content, (*sized, ID), query)


ID = (b"x-request-id", b"given")


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """Return the embedded pair, alone and in a fleet."""
    made = Both()
    yield made
    made.run(made.engine.shutdown(drain=False))
    made.runner.close()


def _same(response: tuple[ResponseHead, bytes]) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return a response without what differs between two equal requests."""
    head, body = response
    kept = {name: value for name, value in head.headers if name != REPLICA.encode()}
    return head.status, kept, CHANGING.sub(b'"changing": 0', body)


REQUESTS = {
    "completion": ("/v1/completions", {"body": PROMPT}),
    "completion-stream": ("/v1/completions", {"body": PROMPT | STREAMED}),
    "chat": ("/v1/chat/completions", {"body": CHAT}),
    "chat-stream": ("/v1/chat/completions", {"body": CHAT | STREAMED}),
    "response": ("/v1/responses", {"body": ANSWER}),
    "response-stream": ("/v1/responses", {"body": ANSWER | STREAMED}),
    "tokens": ("/tokenize", {"body": {"prompt": "def add"}}),
    "models": ("/v1/models", {}),
    "model": ("/v1/models/demo", {}),
    "encoded-path": ("/v1/models/a#b?c", {}),
    "query": ("/v1/models", {"query": b"a=1"}),
    "head": ("/v1/models", {"method": "HEAD"}),
    "version": ("/version", {}),
    "own-page": ("/version", {"headers": ((b"host", b"localhost:1"), (b"origin", b"http://localhost:1"))}),
    "other-page": ("/version", {"headers": ((b"host", b"localhost:1"), (b"origin", b"http://evil.example"))}),
    "other-name": ("/version", {"headers": ((b"host", b"evil.example"),)}),
    "no-json": ("/v1/completions", {"body": b"{"}),
    "wrong-type": ("/v1/completions", {"body": PROMPT | {"max_tokens": "many"}}),
    "too-long": ("/v1/completions", {"body": PROMPT | {"prompt": "x " * 5000}}),
    "refused-stream": ("/v1/completions", {"body": PROMPT | STREAMED | {"temperature": -1}}),
    "unknown-model": ("/v1/completions", {"body": PROMPT | {"model": "other"}}),
    "no-route": ("/v1/nothing", {}),
    "wrong-method": ("/v1/completions", {"method": "DELETE"}),
    "options": ("/v1/completions", {"method": "OPTIONS"}),
    "wrong-method-own": ("/health", {"method": "DELETE"}),
    "page": ("/", {}),
    "page-head": ("/", {"method": "HEAD"}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_responses_are_those_of_the_application(both: Both, name: str) -> None:
    path, request = REQUESTS[name]
    alone, through = (both.ask(app, path, **request) for app in (both.app, both.front))
    assert _same(through) == _same(alone)
    assert (REPLICA.encode(), b"one") in through[0].headers or path == "/" or through[0].status == 403
    assert (b"x-request-id", b"given") in through[0].headers


@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Bearer other"),), (KEY,)])
def test_keys_are_needed_as_in_the_application(both: Both, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    app, front, handle = both.make(api_keys=("sk-1",))
    for path, body in (("/v1/models", None), ("/v1/completions", PROMPT), ("/metrics", None), ("/nothing", None)):
        alone, through = (both.ask(each, path, body=body, headers=headers) for each in (app, front))
        assert through[0].status == alone[0].status
        assert path == "/metrics" or _same(through) == _same(alone)
    assert bool(handle.asked) == (KEY in headers), "a request without a key came to a replica"
    for path in OPEN_PATHS:
        assert both.ask(front, path)[0].status == 200


def test_limits_are_those_of_the_application(both: Both) -> None:
    app, front, handle = both.make(max_body_bytes=1000, max_header_bytes=500)
    for request, status in (
        ({"body": PROMPT | {"prompt": "x" * 1000}}, 413),
        ({"body": PROMPT, "headers": ((b"x-long", b"x" * 500),)}, 431),
    ):
        alone, through = (both.ask(each, "/v1/completions", **request) for each in (app, front))
        assert through[0].status == status
        assert _same(through) == _same(alone)
    assert not handle.asked


def test_health_and_load_count_replicas(both: Both) -> None:
    for path in ("/health", "/ping"):
        head, body = both.ask(both.front, path)
        assert (head.status, json.loads(body)) == (200, {"status": "ok", "replicas": 2})
    _, body = both.ask(both.front, "/load")
    assert json.loads(body) == {"server_load": 3, "replicas": {"one": 0, "two": 3}}


def test_metrics_name_the_replica(both: Both) -> None:
    head, body = both.ask(both.front, "/metrics")
    assert head.status == 200
    names = {
        sample.labels.get("engine")
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert "one" in names
    assert "0" not in names


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/load"])
def test_states_are_named(both: Both, path: str) -> None:
    """Loading, failed, draining, without replicas."""

    def code(front: FastAPI) -> str:
        head, body = both.ask(front, path)
        assert head.status == 503
        return str(json.loads(body)["error"]["code"])

    handle = FakeHandle(answering(both.app), told={"load": [], "page": []})
    front = make_front(FakeReplicas(handle), ServerOptions())
    assert code(front) == "loading"
    both.run(front.state.server.load())
    if path == "/health":
        assert code(front) == "no_replica"
    both.run(front.state.server.drain(0))
    assert code(front) == "shutting_down"
    failing = make_front(FakeReplicas(handle, ConfigError("no", "fix.")), ServerOptions())
    both.run(failing.state.server.load())
    assert code(failing) == "engine_failed"
    assert isinstance(failing.state.server.load_error, ConfigError)


def test_the_lifespan_deploys_and_ends_replicas(both: Both) -> None:
    replicas = FakeReplicas(both.handle)
    front = make_front(replicas, ServerOptions())

    async def live() -> None:
        async with front.router.lifespan_context(front):
            while front.state.server.loading:
                await asyncio.sleep(0.01)
            assert replicas.connected
            assert not replicas.stopped
        assert replicas.stopped

    both.run(live())


def test_a_disconnect_cancels_the_call(both: Both) -> None:
    async def leave() -> None:
        count = len(both.handle.calls)
        request = request_to("/v1/completions", PROMPT | STREAMED | {"max_tokens": 200, "ignore_eos": True})
        async with aclosing(responses(both.front, request)) as pieces:
            for _ in range(3):
                await anext(pieces)
        (call,) = both.handle.calls[count:]
        assert call.cancelled
        while both.app.state.server.admission.count:
            await asyncio.sleep(0.01)

    both.run(leave())


def test_a_disconnect_before_the_head_cancels_too(both: Both) -> None:
    async def silent(_: RoutedRequest) -> AsyncIterator[Any]:
        yield "one"
        await asyncio.sleep(60)

    handle = FakeHandle(silent)
    front = make_front(FakeReplicas(handle), ServerOptions())

    async def leave() -> None:
        await front.state.server.load()
        asking = asyncio.create_task(whole_response(front, request_to("/v1/completions", PROMPT)))
        while not handle.calls:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert handle.calls[0].cancelled

    both.run(leave())


def test_requests_wait_for_a_replica_for_a_while(both: Both) -> None:
    async def waiting(_: RoutedRequest) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield "one"

    handle = FakeHandle(waiting)
    front = make_front(FakeReplicas(handle), ServerOptions(queue_timeout=0.05))
    both.run(front.state.server.load())
    head, body = both.ask(front, "/v1/completions", body=PROMPT)
    assert (head.status, b"No replica took the request in 0.05 s" in body) == (504, True)
    assert handle.calls[0].cancelled


def test_a_replica_without_a_response_is_an_error(both: Both) -> None:
    front = make_front(FakeReplicas(FakeHandle(saying("one"))), ServerOptions())
    both.run(front.state.server.load())
    head, body = both.ask(front, "/v1/completions", body=PROMPT)
    assert head.status == 500
    assert "a replica" not in body.decode()


# --- metrics of replicas on one page


AWKWARD = 'a "b" engine="0" \\ \n{}'


def _page(value: float, label: str = "demo") -> str:
    registry = CollectorRegistry()
    Gauge("vllm:running", 'Says engine="0".', ["model", "engine"], registry=registry).labels(label, "0").set(value)
    Count("vllm:tokens", "Tokens.", ["engine", "model"], registry=registry).labels("0", label).inc(value)
    times = Histogram("vllm:seconds", "Seconds.", ["engine"], buckets=(1, 2), registry=registry)
    times.labels("0").observe(value)
    Gauge("process:memory", "Bytes.", registry=registry).set(value)
    return generate_latest(registry).decode()


def test_each_family_is_described_once() -> None:
    page = joined({"one": _page(1), "two": _page(2)})
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    starts = Counter(line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE"))
    assert set(starts.values()) == {1}
    assert page.endswith("\n")


def test_samples_name_their_replica() -> None:
    families = {each.name: each for each in text_string_to_metric_families(joined({"one": _page(1), "two": _page(2)}))}
    running = {sample.labels["engine"]: sample.value for sample in families["vllm:running"].samples}
    assert running == {"one": 1.0, "two": 2.0}
    assert {sample.labels["engine"] for sample in families["vllm:seconds"].samples} == {"one", "two"}
    assert len(families["vllm:seconds"].samples) == 2 * len([*"123", "sum", "count"])
    (memory,) = families["process:memory"].samples
    assert memory.value == 1.0, "a sample without a replica is not that of the first page"


def test_labels_keep_their_values() -> None:
    families = {each.name: each for each in text_string_to_metric_families(joined({"one": _page(3, AWKWARD)}))}
    (sample,) = families["vllm:running"].samples
    assert sample.labels == {"model": AWKWARD, "engine": "one"}


def test_one_page_stays_as_it_is() -> None:
    page = _page(1)
    assert joined({"0": page}) == page
    assert joined({}) == ""
