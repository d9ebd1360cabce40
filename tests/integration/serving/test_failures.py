"""SIGTERM at any moment, a failing target, a killed engine thread: every stream ends properly."""

from __future__ import annotations

import asyncio
import ctypes
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.async_engines import assert_nothing_is_held, core, engine_threads
from tests.examples import sizes
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import Reply, encoded, exchange
from tests.servers import LiveServer, ServerProcess, serve, serve_process

__all__ = ["checkpoints", "serve", "serve_process"]
DEADLINES = ["0.05", "0.3", "20"]  # seconds
STREAM: dict[str, Any] = {"stream": True, "temperature": 0, "ignore_eos": True}
dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


async def send_streams(
    url: str, count: int, chance: random.Random, meanwhile: Callable[[], Awaitable[None]]
) -> list[Reply]:
    """Act while clients send streams of all lengths, some of several samples, one after another.

    They begin within half a second; none sends another stream when it is done.
    """
    done = asyncio.ensure_future(meanwhile())

    async def one() -> Reply:
        prompt = [chance.randrange(250) for _ in range(chance.choice([1, 30, 150]))]
        body = {**STREAM, "prompt": prompt, "max_tokens": chance.choice([2, 60, 200]), "n": chance.choice([1, 1, 4])}
        try:
            return await exchange(url, encoded("/v1/completions", body))
        except ConnectionError:
            return Reply(0, b"", b"")

    async def send() -> list[Reply]:
        await asyncio.sleep(0.5 * chance.random())
        replies = [await one()]
        while not done.done():
            await asyncio.sleep(0.01)
            replies.append(await one())
        return replies

    made = await asyncio.gather(*(send() for _ in range(count)))
    await done
    return [reply for replies in made for reply in replies]


def assert_ended(replies: list[Reply], *codes: str) -> None:
    """Assert that every stream has its end, and that a broken-off stream gives the reason."""
    for reply in replies:
        if reply.status == 200:
            assert reply.ended, reply.body[-300:]
            last = reply.events[-1]
            assert last == "[DONE]" or json.loads(last)["error"]["code"] in codes, last
        else:
            assert reply.status in (0, 500, 503), reply.body  # 0: no listener any more
            assert reply.status == 0 or reply.value["error"]["code"] in (*codes, "loading")


@pytest.mark.slow  # test_ends.py has a signal to one server
@pytest.mark.parametrize("count", [2, 50])
def test_a_signal_at_any_moment_drains(serve_process: Any, checkpoints: Checkpoints, count: int) -> None:
    """During loading, while requests arrive, while they run, and while it drains already."""
    chance, longest, broken_off = random.Random(count), 0.0, 0
    for number in range(count):
        deadline = DEADLINES[number % len(DEADLINES)]
        server: ServerProcess = serve_process(checkpoints.target, "--drain-timeout", deadline, "--max-num-seqs", "2")
        loading = number % 5 == 4
        if not loading:
            server.ready()

        async def signal(server: ServerProcess = server) -> None:
            await asyncio.sleep(0.9 * chance.random())
            server.signal()

        replies = asyncio.run(send_streams(server.url, 24, chance, signal))
        server.until_loaded()  # loading can't be stopped
        drained = time.monotonic()
        assert server.wait() == 0, server.messages
        longest = max(longest, time.monotonic() - drained)
        server.stop()
        assert "Traceback" not in "".join(server.messages), server.messages
        assert_ended(replies, "shutting_down")
        broken_off += sum("shutting_down" in reply.body.decode() for reply in replies if reply.status == 200)
    print(f"{count} signals; {broken_off} streams ended by the deadline; the longest end took {longest:.2f} s")
    assert count < 50 or longest < 7, "after the last stream's end and loading; last events have 5 s"
    assert broken_off >= count // 2  # the streams of at least every other signal were not through by its deadline


class Faults:
    """Makes passes of a model fail: for batches that `hit` chooses by their number of sequences."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.003) -> None:
        """seconds: that a pass takes at least."""
        target = core(engine)._context.target
        self._forward, self.hit, self.failed, self._seconds = target.forward, lambda width: False, 0, seconds
        monkeypatch.setattr(target, "forward", self.forward)

    def forward(self, batch: Any, *rest: Any) -> Any:
        time.sleep(self._seconds)
        if self.hit(len(batch.segments)):
            self.failed += 1
            raise RuntimeError("CUDA error 0x7f00deadbeef")
        return self._forward(batch, *rest)


@pytest.fixture
def server(serve: Any, checkpoints: Checkpoints) -> LiveServer:
    live: LiveServer = serve(AsyncEngine(checkpoints.target, dtype="float32", max_num_seqs=8)).ready()
    return live


def engine_of(server: LiveServer) -> AsyncEngine:
    engine = server.state.loaded
    assert engine is not None
    return engine


def test_a_pass_that_fails_once_harms_no_request(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, faults = random.Random(1), Faults(engine_of(server), monkeypatch, 0.0)
    faults.hit = lambda width: width > 1 and chance.random() < 0.3

    async def nothing() -> None:
        pass

    replies = asyncio.run(send_streams(server.url, 6, chance, nothing))
    assert faults.failed > 5
    assert all(reply.chunks for reply in replies)
    assert server.http.get("/health").status_code == 200
    assert_nothing_is_held(core(engine_of(server)))


@dies
def test_a_model_that_fails_is_a_failed_engine(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream ends with an error event, and /health reports the failure."""
    faults = Faults(engine_of(server), monkeypatch)

    async def break_it() -> None:
        await asyncio.sleep(0.3)
        faults.hit = lambda width: True

    replies = asyncio.run(send_streams(server.url, 12, random.Random(2), break_it))
    assert_ended(replies, "engine_failed", "internal_error")
    assert any("internal_error" in reply.body.decode() for reply in replies if reply.status == 200)
    for response in (server.http.get("/health"), server.http.post("/v1/completions", json={"prompt": "a"})):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")
        assert "0x" not in response.text


@dies
@pytest.mark.parametrize("count", sizes(1, 50))
def test_a_killed_thread_ends_every_stream(serve: Any, checkpoints: Checkpoints, count: int) -> None:
    """The thread is killed between any two instructions of its Python code."""
    chance, slowest = random.Random(count), 0.0
    for _ in range(count):
        others = {thread.ident for thread in engine_threads()}
        server: LiveServer = serve(AsyncEngine(checkpoints.target, dtype="float32", max_num_seqs=4)).ready()
        (ident,) = {thread.ident for thread in engine_threads()} - others
        noticed: list[float] = []

        async def kill(server: LiveServer = server, ident: int | None = ident, noticed: list[float] = noticed) -> None:
            await asyncio.sleep(0.6 * chance.random())
            killed = time.monotonic()
            while (await exchange(server.url, encoded("/health"))).status == 200:
                # repeatedly: an exception within a callback or a finaliser is lost
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(SystemExit))
                await exchange(server.url, encoded("/v1/completions", {"prompt": "a"}))  # wakes it if it sleeps
                assert time.monotonic() < killed + 20
            noticed.append(time.monotonic() - killed)

        replies = asyncio.run(send_streams(server.url, 8, chance, kill))
        slowest = max(slowest, *noticed)
        assert_ended(replies, "engine_failed")
        assert threading.main_thread().is_alive()
        server.stop()
    print(f"{count} threads killed; /health said so after {slowest:.3f} s at most")
