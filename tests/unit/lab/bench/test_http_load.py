"""Load on a scripted server: the requests and their times, and the counts of the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
import pytest

from speculant.lab.bench.serving_load import Exchange, Load, LoadRun
from speculant.metrics import TimingMetrics

Handler = Callable[[httpx.Request], Coroutine[Any, Any, httpx.Response]]
FIELDS = {"model": "m", "max_tokens": 3}


def _load(handler: Handler, prompts: Sequence[str] = ("a", "b")) -> Load:
    return Load(lambda: httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handler)), prompts)


def _event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def _text(text: str) -> bytes:
    return _event({"choices": [{"index": 0, "text": text}]})


async def _stream(*events: bytes, gap: float = 0.0) -> AsyncIterator[bytes]:
    for event in events:
        await asyncio.sleep(gap)
        yield event


def _answer(*texts: str, gap: float = 0.0, tokens: int | None = None) -> httpx.Response:
    usage = _event({"choices": [], "usage": {"completion_tokens": len(texts) if tokens is None else tokens}})
    return httpx.Response(200, content=_stream(*map(_text, texts), usage, _event(b"[DONE]"), gap=gap))


def _exchange(sent: float, ended: float, tokens: int = 10, due: float | None = None, **rest: Any) -> Exchange:
    timing = TimingMetrics(sent if due is None else due)
    return Exchange(0, timing, sent, ended, **{"status": 200, "problem": None, "tokens": tokens, **rest})


def test_an_answer_is_read_to_its_end() -> None:
    bodies: list[Any] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        bodies.append((request.url.path, json.loads(request.content)))
        return _answer("x", "", "yz", gap=0.02, tokens=3)

    run = _load(handler).open_loop(FIELDS, [0.0, 0.0, 0.0])
    first = run.exchanges[0]
    assert (first.text, first.tokens, first.status, first.completed, first.refused) == ("xyz", 3, 200, True, False)
    assert 0.02 <= (first.timing.ttft_s or 0) < first.ended - first.timing.arrival
    assert len(first.timing.gaps) == 1, "an empty text has no time"
    assert first.timing.gaps[0] >= 0.04
    assert {path for path, _ in bodies} == {"/v1/completions"}
    assert sorted(body["prompt"] for _, body in bodies) == ["a", "a", "b"]
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for _, body in bodies)
    assert all(body["model"] == "m" and body["max_tokens"] == 3 for _, body in bodies)


def test_a_run_shares_a_salt_and_runs_do_not() -> None:
    salts: list[str] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        salts.append(json.loads(request.content)["cache_salt"])
        return _answer("x")

    load = _load(handler)
    load.open_loop(FIELDS, [0.0, 0.0])
    load.open_loop(FIELDS, [0.0])
    assert salts[0] == salts[1] != salts[2]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    at_once = most = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.3)
        at_once -= 1
        return _answer("x")

    arrivals = [0.0, 0.02, 0.04, 0.06, 0.1]
    run = _load(handler).open_loop(FIELDS, arrivals)
    assert most == 5
    assert [each.number for each in run.exchanges] == [0, 1, 2, 3, 4]
    assert [each.timing.arrival - run.started for each in run.exchanges] == pytest.approx(arrivals)
    assert all(each.sent >= each.timing.arrival for each in run.exchanges)
    assert 0.4 <= run.window < 5


def test_latency_counts_from_the_due_time() -> None:
    """A busy client sends late, and its users wait during that time too."""

    async def handler(request: httpx.Request) -> httpx.Response:
        time.sleep(0.1)  # nothing else runs meanwhile
        return _answer("x")

    figures = _load(handler).open_loop(FIELDS, [0.0, 0.0, 0.0]).figures()
    assert figures["e2e_p99_s"] >= 0.3
    assert figures["ttft_p99_s"] >= 0.3
    assert figures["lag_p99_s"] < 0.3


def test_a_closed_loop_has_one_request_per_client() -> None:
    at_once = 0
    seen: list[int] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal at_once
        at_once += 1
        seen.append(at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        return _answer("x")

    run = _load(handler).closed_loop(FIELDS, 3, 0.4)
    assert max(seen) == 3
    assert run.window == 0.4
    assert sorted(each.number for each in run.exchanges) == [each.number for each in run.exchanges]
    assert 3 * 2 <= len(run.exchanges) <= 3 * 8
    assert run.figures()["requests_per_s"] <= 60.0
    assert all(each.sent < run.started + 0.4 for each in run.exchanges)


def test_a_refused_client_pauses_and_tries_again() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": {"message": "full"}})

    run = _load(handler).closed_loop(FIELDS, 1, 0.2)
    assert 2 <= len(run.exchanges) <= 5
    assert all(each.refused and not each.completed for each in run.exchanges)
    assert (run.completed, run.problems) == ([], [])


async def _broken(*events: bytes) -> AsyncIterator[bytes]:
    for event in events:
        yield event
    raise httpx.ReadError("it broke off")


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (lambda: httpx.Response(400, json={"error": {"message": "too long"}}), "too long (400)"),
        (lambda: httpx.Response(503, json={"error": "busy"}), "busy (503)"),
        (lambda: httpx.Response(502, content=b"<html>"), "no reason given (502)"),
        (lambda: httpx.Response(200, content=_stream(_text("x"))), "the answer ended early"),
        (lambda: httpx.Response(200, content=_stream(_event({"error": {"message": "dead"}}))), "dead"),
        (
            lambda: httpx.Response(200, content=_stream(_event({"error": {"message": "dead"}}), _event(b"[DONE]"))),
            "dead",
        ),
        (lambda: httpx.Response(200, content=_stream(_event(b"[1]"))), "ValueError: an event is not an object"),
        (lambda: httpx.Response(200, content=_broken(_text("x"))), "ReadError: it broke off"),
    ],
)
def test_a_failure_is_counted_with_its_reason(response: Callable[[], httpx.Response], problem: str) -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        return response() if json.loads(request.content)["prompt"] == "b" else _answer("x", "y")

    run = _load(handler).open_loop(FIELDS, [0.0] * 4)
    assert run.problems == [problem] * 2
    figures = run.figures()
    assert (figures["requests"], figures["completed"], figures["failed"], figures["refused"]) == (4, 2, 2, 0)
    assert figures["tokens_per_s"] == pytest.approx(4 / run.window)


def test_tokens_are_counted_if_the_server_does_not() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=_stream(_text("x"), _text("y"), _event(b"[DONE]")))

    assert _load(handler).open_loop(FIELDS, [0.0]).exchanges[0].tokens == 2


def test_percentiles_are_nearest_ranks_of_completed_requests() -> None:
    exchanges = [_exchange(0.0, (i + 1) / 100) for i in range(100)]
    exchanges += [_exchange(0.0, 50.0, status=429, problem="full"), _exchange(0.0, 60.0, problem="dead")]
    for each in exchanges:
        each.timing.record_tokens(each.ended / 2, 1)
        each.timing.record_tokens(each.ended, 1)
    figures = LoadRun(exchanges, 0.0, 2.0).figures()
    assert [figures[f"e2e_p{q}_s"] for q in (50, 90, 99)] == [0.5, 0.9, 0.99]
    assert [figures[f"ttft_p{q}_s"] for q in (50, 90, 99)] == [0.25, 0.45, 0.495]
    assert [figures[f"itl_p{q}_s"] for q in (50, 90, 99)] == pytest.approx([0.25, 0.45, 0.495])
    assert figures["itl_mean_s"] == pytest.approx(0.2525)
    assert (figures["requests"], figures["completed"], figures["refused"], figures["failed"]) == (102, 100, 1, 1)
    assert figures["requests_per_s"] == 50
    assert figures["tokens_per_s"] == 500


def test_a_request_counts_by_its_share_inside_the_window() -> None:
    """Two clients whose requests take 0.4 s: 5 requests per second, wherever the window ends."""
    exchanges = [_exchange(0.4 * i, 0.4 * i + 0.4) for i in range(5) for _ in range(2)]
    for window in (1.0, 1.2, 1.5, 1.9):
        begun = [each for each in exchanges if each.sent < window]
        figures = LoadRun(begun, 0.0, window).figures()
        assert figures["requests_per_s"] == pytest.approx(5.0)
        assert figures["tokens_per_s"] == pytest.approx(50.0)


def test_a_run_without_answers_has_no_latencies() -> None:
    figures = LoadRun([_exchange(0.0, 1.0, status=429, problem="full")], 0.0, 1.0).figures()
    assert figures["requests_per_s"] == 0
    assert not [name for name in figures if name.startswith(("ttft", "itl", "e2e"))]
