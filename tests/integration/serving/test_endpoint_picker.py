"""An endpoint picker finds in the metrics of servers which of them is idle, and where a prefix is cached."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.async_engines import core
from tests.endpoint_picker import WEIGHTS, EndpointPicker, Load, read_load
from tests.models import Checkpoints
from tests.servers import LiveServer, serve

__all__ = ["serve"]
Serve = Callable[..., LiveServer]
BLOCK = 8


def prompt_of(seed: int, count: int = 6 * BLOCK) -> list[int]:
    return random.Random(seed).choices(range(33, 127), k=count)


@pytest.fixture(scope="module")
def servers(checkpoints: Checkpoints) -> Iterator[list[LiveServer]]:
    """Return three servers with keys, of which each runs one sequence at a time, in steps of at least 20 ms."""
    started = []
    for _ in range(3):
        engine = AsyncEngine(checkpoints.target, max_num_seqs=1, block_size=BLOCK)
        core(engine).step = partial(slow_step, core(engine).step)  # type: ignore[method-assign]
        started.append(LiveServer(engine, api_keys=("key",), metrics_without_key=True).ready())
        started[-1].http.headers["authorization"] = "Bearer key"
    yield started
    for server in started:
        server.stop()


def slow_step(step: Callable[[], Any]) -> Any:
    time.sleep(0.02)
    return step()


@pytest.fixture
def picker(servers: list[LiveServer]) -> EndpointPicker:
    return EndpointPicker(server.url for server in servers)


def load_of(server: LiveServer) -> Load:
    return read_load(server.http.get("/metrics").text)


@contextmanager
def streams(server: LiveServer, count: int) -> Iterator[None]:
    """Read this many streams of a server, until the block ends."""
    ended = threading.Event()

    def read(seed: int) -> None:
        body = {"prompt": prompt_of(seed), "max_tokens": 200, "ignore_eos": True}
        for _ in server.events("/v1/completions", **body):
            if ended.is_set():
                return

    with ThreadPoolExecutor(count) as threads:
        reading = [threads.submit(read, 400 + place) for place in range(count)]
        try:
            yield
        finally:
            ended.set()
    assert all(each.exception() is None for each in reading)


def complete(server: LiveServer, prompt: list[int]) -> int:
    """Return how many tokens of a prompt were cached."""
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=1)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_picker_avoids_servers_with_a_queue(servers: list[LiveServer], picker: EndpointPicker) -> None:
    server_of = {server.url: server for server in servers}
    busy = server_of[picker.pick(prompt_of(100)).url]
    assert load_of(busy) == Load(0, 0, 0, BLOCK, load_of(busy).num_blocks)
    with streams(busy, 3):
        busy.until(lambda: load_of(busy).waiting > 0)
        assert load_of(busy).running == 1
        assert load_of(busy).usage > 0
        for weights in (WEIGHTS, {"queue": 1.0}, {"cache": 1.0}):
            picker.weights = weights
            picked = {picker.pick(prompt_of(200 + index)).url for index in range(3)}
            assert picked
            assert busy.url not in picked


def test_the_picker_finds_a_cached_prefix(servers: list[LiveServer], picker: EndpointPicker) -> None:
    server_of = {server.url: server for server in servers}
    shared = prompt_of(1, 12 * BLOCK)
    first = picker.pick(shared)
    assert complete(server_of[first.url], shared) == 0
    picker.endpoints.reverse()  # of equal endpoints, the first one gets a request
    for index in range(3):
        longer = [*shared, *prompt_of(300 + index, BLOCK)]
        assert picker.pick(longer) is first
        assert complete(server_of[first.url], longer) >= len(shared) - BLOCK
    others = [server for server in servers if server.url != first.url]
    assert [complete(server, shared) for server in others] == [0, 0]


def test_the_picker_leaves_servers_that_drain(servers: list[LiveServer], picker: EndpointPicker) -> None:
    shared = prompt_of(2)
    first = picker.pick(shared)
    picker.endpoints.reverse()
    assert picker.pick(shared) is first
    (server,) = (each for each in servers if each.url == first.url)
    server.state.draining = True
    try:
        assert picker.pick(shared) is not first
    finally:
        server.state.draining = False


def test_metrics_need_a_key_unless_they_are_opened(serve: Serve, checkpoints: Checkpoints) -> None:
    closed = serve(AsyncEngine(checkpoints.target), api_keys=("key",)).ready()
    assert closed.http.get("/metrics").status_code == 401
    opened = serve(AsyncEngine(checkpoints.target), api_keys=("key",), metrics_without_key=True).ready()
    assert opened.http.get("/metrics").status_code == 200
    assert {opened.http.get(path).status_code for path in ("/load", "/props", "/v1/models", "/metrics/x")} == {401}


@pytest.mark.parametrize("missing", ["vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "num_gpu_blocks"])
def test_a_page_without_a_metric_is_an_error(servers: list[LiveServer], missing: str) -> None:
    page = servers[0].http.get("/metrics").text
    assert read_load(page)
    with pytest.raises(KeyError):
        read_load(page.replace(missing, "other"))
