"""Clients that send hostile forms delay neither a plain request of another client nor its forms."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest

from tests.hostile_forms import HOSTILE, Form, ordinary
from tests.servers import LiveServer, ServerProcess, serve_process

__all__ = ["serve_process"]
MOST_DELAY_S = 0.1
NEIGHBOUR, ATTACKER = "127.0.0.1", "127.0.0.2"
_numbers = count()


def client_at(address: str, url: str) -> httpx.Client:
    """Return a client of a server from an address, by which the server tells clients apart."""
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=url, timeout=60, trust_env=False, transport=transport)


def complete(http: httpx.Client, form: Form | None = None) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    if form is not None:
        body["structured_outputs"] = form
    return http.post("/v1/completions", json=body)


@contextmanager
def attack(url: str, form: Callable[[int], Form], num_threads: int = 6) -> Iterator[Counter[int]]:
    """Send hostile forms from one address while the block runs, each of them new. Yields the answers by status."""
    done, statuses = threading.Event(), Counter[int]()

    def run() -> None:
        with client_at(ATTACKER, url) as http:
            while not done.is_set():
                statuses[complete(http, form(next(_numbers))).status_code] += 1

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.3)
        yield statuses
    finally:
        done.set()
        for thread in threads:
            thread.join()


def worst(http: httpx.Client, seconds: float, form: Callable[[int], Form] | None = None) -> float:
    """Return the longest time of an answer while requests are sent one after another."""
    longest, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.monotonic()
        response = complete(http, None if form is None else form(next(_numbers)))
        longest = max(longest, time.monotonic() - started)
        assert response.status_code == 200, response.text
        time.sleep(0.02)
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_delay_no_neighbour(serve_process: Any, name: str) -> None:
    """Measured twice: another program may have delayed one answer."""
    server: ServerProcess = serve_process("demo").ready()
    delays: dict[str, float] = {}
    with client_at(NEIGHBOUR, server.url) as http:
        worst(http, 0.5, ordinary)
        for _ in range(2):
            for kind, form in (("plain", None), ("form", ordinary)):
                alone = worst(http, 1.5, form)
                with attack(server.url, HOSTILE[name]) as statuses:
                    beside = worst(http, 3.0, form)
                assert statuses.keys() <= {200, 400, 429}, statuses
                delays[kind] = min(delays.get(kind, 99.0), beside - alone)
                print(f"{name}, {kind}: {alone:.3f} s alone, {beside:.3f} s beside; {dict(statuses)}")
    assert max(delays.values()) < MOST_DELAY_S


@pytest.mark.parametrize("name", ["repetitions", "alternatives", "lexemes", "followed"])
def test_hostile_forms_get_a_clear_refusal(demo: LiveServer, name: str) -> None:
    """Or an answer. A neighbour's text is the same as before."""
    expected = demo.post("/v1/completions", prompt="Once", max_tokens=8, temperature=0)["choices"]
    response = complete(demo.http, HOSTILE[name](0))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert "simplify it" in response.json()["error"]["message"]
    assert demo.post("/v1/completions", prompt="Once", max_tokens=8, temperature=0)["choices"] == expected
