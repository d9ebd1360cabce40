"""Clients that send hostile forms delay neither a plain request of another client nor its forms."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def send_hostile(url: str, name: str, ready: Any, done: Any, num_threads: int = 6) -> None:
    """Send hostile forms from one address, each of them new, until `done` is set. Runs in a process of its own."""
    os.nice(10)  # its time is that of another machine

    def run(first: int) -> None:
        with client_at(ATTACKER, url) as http:
            for number in count(first, num_threads):
                if done.is_set():
                    return
                assert complete(http, HOSTILE[name](number)).status_code in (200, 400, 429)
                ready.set()

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, range(num_threads)))


@contextmanager
def attack(url: str, name: str) -> Iterator[None]:
    """Send hostile forms while the block runs."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=send_hostile, args=(url, name, ready, done))
    process.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        done.set()
        process.join(120)
    assert process.exitcode == 0, "an answer was an error of the server"


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
                with attack(server.url, name):
                    beside = worst(http, 3.0, form)
                delays[kind] = min(delays.get(kind, 99.0), beside - alone)
                print(f"{name}, {kind}: {alone:.3f} s alone, {beside:.3f} s beside")
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
