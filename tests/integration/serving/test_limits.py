"""Too large requests are refused within a second, and /health answers meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from speculant import AsyncEngine
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import encoded, exchange, opened
from tests.servers import LiveServer, ServerProcess, serve, serve_process

__all__ = ["checkpoints", "serve", "serve_process"]
PAUSE_S = 0.02
HOSTILE: dict[str, dict[str, Any]] = {  # forms whose texts are small
    "nested repetitions": {"regex": "(((a{1000}){1000}){1000})"},
    "deeper repetitions": {"regex": "((((((a{100}){100}){100}){100}){100}){100})"},
    "pattern": {"json": {"type": "string", "pattern": "^(((ab){1000}){1000}){1000}$"}},
    "items": {
        "json": {"type": "array", "minItems": 1_000_000, "items": {"const": "x"}},
        "disable_any_whitespace": True,
    },
}
LARGE: dict[str, bytes] = {
    "n": b'{"prompt": "a", "n": 1000000000}',
    "stops": b'{"prompt": "a", "stop": [' + b'"x",' * 100_000 + b'"x"]}',
    "deep": b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "deep extra": b'{"prompt": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "bias": b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": 1' % i for i in range(5000)) + b"}}",
    "grammar": b'{"prompt": "a", "structured_outputs": {"grammar": "' + b"x" * 2_000_000 + b'"}}',
    "text": b'{"prompt": "' + b"word " * 500_000 + b'"}',
    "tokens": b'{"prompt": [' + b"1," * 100_000 + b"1]}",
    "prompts": b'{"prompt": [' + b'"a",' * 1000 + b'"a"]}',
    "samples": b'{"prompt": [' + b'"a",' * 100 + b'"a"], "n": 100}',
    "number": b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    "no object": b"[]",
    "no JSON": b'{"prompt": ',
    "messages": b'{"prompt": "a", "logprobs": 1000000}',
    "body": b"x" * 2**26,
    **{name: json.dumps({"prompt": "a", "structured_outputs": form}).encode() for name, form in HOSTILE.items()},
}


class HealthWatch:
    """Sends requests to /health while the block runs, at least one, and notes each one's seconds by a clock.

    It asks at most every PAUSE_S, because its requests take processor time for as long as a refusal waits for its turn.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._clock, self._done = url, clock, threading.Event()
        self.times: list[float] = []  # of each answer, in seconds
        self.own_s = 0.0  # processor time of the watch itself
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        with httpx.Client(base_url=self._url, trust_env=False, verify=False) as client:
            while not (self.times and self._done.wait(PAUSE_S)):
                started = self._clock()
                assert client.get("/health").status_code == 200
                self.times.append(self._clock() - started)
        self.own_s = time.thread_time()

    def share_within(self, seconds: float) -> float:
        """Return the share of answers within a time."""
        return sum(each <= seconds for each in self.times) / len(self.times)


def refusal_time(url: str, request: bytes) -> float:
    """Send a request that has to be refused; return the seconds that this took."""
    reply = asyncio.run(exchange(url, request))
    assert 400 <= reply.status < 500, (reply.status, reply.body[:500])
    assert reply.value["error"]["message"]
    assert len(reply.body) < 3000
    return reply.seconds


def second_chance(url: str, request: bytes) -> float:
    """Return the time of a refusal. One over a second is measured again: other programs may have delayed it."""
    took = refusal_time(url, request)
    return min(took, refusal_time(url, request)) if took > 1 else took


ALIKE = ("deeper repetitions", "pattern")  # as nested repetitions
EACH = [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in LARGE]


@pytest.mark.parametrize("name", EACH)
def test_too_much_is_refused_at_once(demo: LiveServer, name: str) -> None:
    """By the processor time of this process, which the server is a thread of, without the watch's."""
    started = time.process_time()
    with HealthWatch(demo.url, time.process_time) as watch:
        refusal_time(demo.url, encoded("/v1/completions", LARGE[name]))
    assert time.process_time() - started - watch.own_s < 3
    assert max(watch.times) < 1.5


@pytest.mark.slow
def test_a_hundred_of_each_are_refused_at_once(serve_process: Any) -> None:
    """One after another, and eight at a time.

    Other programs run, too: a slow refusal is tried again, and one in fifty answers of /health may be late. A request
    that held up the server would delay many of them.
    """
    server: ServerProcess = serve_process("demo").ready()
    for name, body in LARGE.items():
        request = encoded("/v1/completions", body)
        with HealthWatch(server.url) as watch:
            times = [second_chance(server.url, request) for _ in range(100)]
        with HealthWatch(server.url) as crowded, ThreadPoolExecutor(8) as pool:
            together = list(pool.map(refusal_time, [server.url] * 100, [request] * 100))
        print(
            f"{name}: one at a time at most {max(times):.3f} s, /health {max(watch.times):.3f} s,"
            f" {watch.share_within(0.25):.2%} in time; eight at a time {max(together):.3f} s,"
            f" /health {max(crowded.times):.3f} s, {crowded.share_within(0.25):.2%} in time"
        )
        assert max(times) < 1, name
        assert watch.share_within(0.25) > 0.98, name


def test_a_large_body_is_not_read(demo: LiveServer) -> None:
    """The answer comes before the whole body."""
    with opened(demo.url) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 67108864\r\n\r\n" + b"x" * 1000
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
    response = demo.http.post("/v1/completions", content=(b"x" * 2**20 for _ in range(8)))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_large_headers_are_refused(demo: LiveServer) -> None:
    for size in (40_000, 200_000):
        assert demo.http.get("/health", headers={"X-Large": "x" * size}).status_code == 431
    assert demo.http.get("/health", params={"large": "x" * 40_000}).status_code == 431


def test_slow_bodies_and_many_messages_are_refused(serve: Any, checkpoints: Checkpoints) -> None:
    server = serve(AsyncEngine(checkpoints.target), body_timeout=0.2, max_messages=3).ready()

    def slowly() -> Any:
        yield b'{"prompt":'
        time.sleep(0.5)
        yield b'"a"}'

    assert server.http.post("/v1/completions", content=slowly()).status_code == 408
    message = {"role": "user", "content": "a"}
    response = server.http.post("/v1/chat/completions", json={"messages": [message] * 4})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_a_model_without_a_template_says_so(serve: Any, checkpoints: Checkpoints) -> None:
    server = serve(AsyncEngine(checkpoints.target)).ready()
    response = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    assert checkpoints.target not in response.text


def test_keys_share_no_cache(serve: Any, checkpoints: Checkpoints) -> None:
    server = serve(AsyncEngine(checkpoints.target), api_keys=("one", "two"), served_model_names=("m",)).ready()
    prompt = list(range(40, 90))
    cached = [
        server.http.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers={"Authorization": f"Bearer {key}"}
        ).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in ("one", "one", "two")
    ]
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] > 0


def test_other_sites_are_admitted_by_name_alone(serve: Any, checkpoints: Checkpoints) -> None:
    site = {"Origin": "https://a.example"}
    closed = serve(AsyncEngine(checkpoints.target)).ready()
    assert "access-control-allow-origin" not in closed.http.get("/health", headers=site).headers
    opened = serve(AsyncEngine(checkpoints.target), allowed_origins=("https://a.example",)).ready()
    allowed = opened.http.get("/health", headers=site).headers["access-control-allow-origin"]
    assert allowed == "https://a.example"
    other = opened.http.get("/health", headers={"Origin": "https://b.example"}).headers
    assert "access-control-allow-origin" not in other
