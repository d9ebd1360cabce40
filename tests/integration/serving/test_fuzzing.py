"""Random requests: none breaks the server, and none hangs.

Some are valid and invalid by the served OpenAPI document. Others are changed copies of valid bodies of every surface.
"""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.errors import Unsatisfiable

from speculant import AsyncEngine
from tests.examples import sizes
from tests.json_faults import EXTREMES, paths
from tests.models import Checkpoints, checkpoints
from tests.servers import LiveServer, ServerProcess, serve_process
from tests.surfaces import IS_ERROR, Body, draw_body, write_model

__all__ = ["checkpoints", "serve_process"]
HANGS = 1.0  # seconds of this process, which the server is a thread of: other programs add none


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[LiveServer]:
    """Return a server whose answers are short, so that no answer is slow because of its length."""
    engine = AsyncEngine(checkpoints.target, draft_model=checkpoints.near, dtype="float32", max_model_len=48)
    live = LiveServer(engine, max_samples=32).ready()
    yield live
    live.stop()


class Sender:
    """Sends cases. A request that takes over a second is sent again: a request that hangs does so twice."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self.statuses: dict[int, int] = {}
        self.slowest = 0.0

    def send(self, case: Any) -> None:
        response, took = self._timed(case)
        if took > HANGS:
            response, took = self._timed(case)
        self.slowest = max(self.slowest, took)
        self.statuses[response.status_code] = self.statuses.get(response.status_code, 0) + 1
        assert response.status_code < 500, (case.as_curl_command(), response.content[:500])
        assert took < HANGS, (case.as_curl_command(), took)

    def _timed(self, case: Any) -> tuple[Any, float]:
        started = time.process_time()
        response = case.call(base_url=self._server.url, timeout=20)
        return response, time.process_time() - started


@pytest.mark.slow
@pytest.mark.parametrize("count", sizes(150, 2000))
def test_random_requests_break_nothing(server: LiveServer, count: int) -> None:
    schemathesis, sender = pytest.importorskip("schemathesis"), Sender(server)
    operations = [
        each.ok() for each in schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations()
    ]
    with_bodies = [each for each in operations if each.body]
    share = count // (2 * len(with_bodies))
    for operation in operations:
        number = share if operation in with_bodies else max(1, share // 20)  # most others have no field to vary
        for mode in schemathesis.GenerationMode:
            _send_many(sender, operation, mode, number)
    sent = sum(sender.statuses.values())
    print(f"{sent} requests, statuses {sender.statuses}, the slowest took {sender.slowest:.3f} s")
    assert sent >= 0.95 * count
    assert sender.statuses.get(200, 0) > 0.02 * count
    assert any(400 <= status < 500 for status in sender.statuses)
    assert server.post("/v1/completions", prompt="a", max_tokens=2)["choices"]


def _send_many(sender: Sender, operation: Any, mode: Any, count: int) -> None:
    cases = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases, st.booleans())
    def send(case: Any, named: bool) -> None:
        if isinstance(case.body, dict) and not named:
            case.body.pop("model", None)  # most names are unknown, so such a request ends early
        sender.send(case)

    with suppress(Unsatisfiable):  # an empty request can't be wrong
        send()


BATCH, ROOM = 50, 2**25  # bodies after which an ordinary one is sent; bytes that memory may grow in the second half
PLAIN: Body = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0}
SMALL = [*("--max-model-len", "512", "--max-samples", "8", "--max-stored-bytes", str(2**16))]
SUFFIX = ["--speculative-config", json.dumps({"method": "suffix", "suffix_decoding_corpus_tokens": 2**12})]


@pytest.mark.parametrize("count", sizes(150, 5000))
def test_changed_bodies_break_nothing(serve_process: Callable[..., ServerProcess], tmp_path: Path, count: int) -> None:
    """None gets a status of 500 or a traceback, and the server's memory does not grow."""
    model = write_model(tmp_path / "model", longest=512)
    server = serve_process(model, *SMALL, *SUFFIX).ready()
    usual, memory = server.http.post("/v1/completions", json=PLAIN).json()["choices"], [server.memory]
    chance, statuses = Random(count), Counter[int]()
    for number in range(count):
        path = chance.choice([*IS_ERROR])
        statuses[_sent(server.http, path, changed(chance, draw_body(chance, path)))] += 1
        if number % BATCH == 0:
            assert server.http.post("/v1/completions", json=PLAIN).json()["choices"][0]["text"] == usual[0]["text"]
        if (number + 1) % (count // 2) == 0:
            memory.append(server.memory)
    print(f"{dict(statuses)}, memory {[f'{each >> 20} MiB' for each in memory]}")
    assert statuses[200] > 0.05 * count < statuses[400]
    assert not [message for message in server.messages if "Traceback" in message or "failed" in message]
    assert memory[2] - memory[1] < ROOM


def _sent(http: httpx.Client, path: str, data: bytes) -> int:
    """Send a body; check what comes back, and return its status."""
    response = http.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413, 429), (path, data[:2000], response.text[:2000])
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        assert [json.loads(line) for line in lines]
    else:
        assert IS_ERROR[path](response.json()) == (response.status_code != 200), (path, response.text[:2000])
    return response.status_code


def changed(chance: Random, body: Body) -> bytes:
    """Return a body with one to three changes, as JSON or nearly so."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 2, 3))):
        chance.choice(CHANGES)(chance, body)
    data = json.dumps(body).encode()
    if chance.random() < 0.05:
        place = chance.randrange(len(data) + 1)
        data = data[:place] + chance.choice((b"", b"\xff", b'"', b"}", data[place + 1 :]))
    return data


def _at(chance: Random, body: Body) -> tuple[Any, Any]:
    """Return an object or list within a body, and one of its keys."""
    *before, last = chance.choice(paths(body) or [("model",)])
    parent: Any = body
    for key in before:
        parent = parent[key]
    return parent, last


def _replace(chance: Random, body: Body) -> None:
    parent, key = _at(chance, body)
    parent[key] = copy.deepcopy(chance.choice(VALUES))


def _remove(chance: Random, body: Body) -> None:
    parent, key = _at(chance, body)
    with suppress(LookupError):
        del parent[key]


def _nest(chance: Random, body: Body) -> None:
    parent, key = _at(chance, body)
    value = parent.get(key) if isinstance(parent, dict) else parent[key]
    for _ in range(chance.choice((1, 2, 50, 300))):
        value = [value] if chance.random() < 0.5 else {"type": value}
    parent[key] = value


def _repeat(chance: Random, body: Body) -> None:
    parent, key = _at(chance, body)
    value = parent.get(key) if isinstance(parent, dict) else parent[key]
    if isinstance(value, list | str) and len(value) < 10_000:
        parent[key] = value * chance.choice((0, 2, 200))


def _add(chance: Random, body: Body) -> None:
    """Add a field of another route, or one that nobody knows."""
    other = draw_body(chance, chance.choice([*IS_ERROR]))
    name = chance.choice([*other, *OTHERS])
    body[name] = other.get(name, copy.deepcopy(chance.choice(VALUES)))


VALUES = [
    *EXTREMES,
    "\ud800",
    "a\udfffb",
    "x" * 50_000,
    [[]],
    [{}],
    {"": ""},
    {"type": []},
    {"type": "text"},
    [1.5],
    -1,
]
OTHERS = [
    "stream",
    "n",
    "n_predict",
    "cache_prompt",
    "thinking",
    "system",
    "speculation",
    "beam_width",
    "priority",
    "Ω",
]
CHANGES = [_replace, _replace, _replace, _remove, _nest, _repeat, _add]
