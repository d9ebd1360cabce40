"""Random requests, valid and invalid by the served OpenAPI document: none breaks the server, none hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.errors import Unsatisfiable

from speculant import AsyncEngine
from tests.examples import sizes
from tests.models import Checkpoints, checkpoints
from tests.servers import LiveServer

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis")
__all__ = ["checkpoints"]
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


@pytest.mark.parametrize("count", sizes(150, 2000))
def test_random_requests_break_nothing(server: LiveServer, count: int) -> None:
    sender = Sender(server)
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
