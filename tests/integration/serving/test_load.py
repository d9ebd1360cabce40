"""Crowds: many streams at once, clients that disconnect or hardly read, and far more requests than can be served."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from speculant import AsyncEngine
from speculant.engine.async_engine import PieceStream
from tests.async_engines import assert_nothing_is_held, core
from tests.examples import sizes
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import Connection, Reply, decoded, encoded, exchange
from tests.servers import LiveServer, ServerProcess, serve, serve_process

pytestmark = pytest.mark.slow

__all__ = ["checkpoints", "serve", "serve_process"]
STEP = 0.03  # least seconds of a step of the crowd's engine, so that the loop keeps up with it
SMALLEST_BUFFER = 2048  # bytes


class Watch:
    """Counts steps that still have requests of gone clients. Prompts begin with a number.

    since_close: steps that began after a client had closed its connection and still had its request. since_notice: the
    same, after the server had noticed it.
    """

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine, self._step, self.steps = core(engine), core(engine).step, 0
        self._abort = engine._thread.abort
        self._closed: dict[int, int] = {}
        self._noticed: dict[int, int] = {}
        self.since_close: list[int] = []
        self.since_notice: list[int] = []
        monkeypatch.setattr(self._engine, "step", self.step)
        monkeypatch.setattr(engine._thread, "abort", self.abort)

    def gone(self, number: int) -> None:
        """Note that a client has just disconnected."""
        self._closed[number] = self.steps

    def abort(self, stream: PieceStream) -> None:
        """Note that the server has aborted a request, or has ended it."""
        self._noticed[_number(stream.generation._tokens)] = self.steps
        self._abort(stream)

    def step(self) -> Any:
        """Take the engine's next step."""
        time.sleep(STEP)
        held = {_number(request.prompt) for each in self._engine._by_id.values() for request in each}
        for since, delays in ((self._closed, self.since_close), (self._noticed, self.since_notice)):
            for number in since.keys() - held:
                delays.append(self.steps - since.pop(number))
        self.steps += 1
        return self._step()


def _number(prompt: Sequence[int]) -> int:
    return prompt[0] + 250 * prompt[1]


@dataclass
class Client:
    """One of many clients. leaves: bytes after which it disconnects; None = never. slow: reads one byte per second."""

    number: int
    body: dict[str, Any]
    leaves: int | None = None
    slow: bool = False
    read: bytearray = field(default_factory=bytearray)

    async def run(self, url: str, watch: Watch, begins: float, abrupt: bool, over: asyncio.Event) -> None:
        """Connect, send, and read as this client does; slow clients disconnect at the end."""
        await asyncio.sleep(begins)
        async with Connection(url, SMALLEST_BUFFER if self.slow else None) as connection:
            await connection.send(encoded("/v1/completions", self.body))
            while not over.is_set() and (self.leaves is None or len(self.read) < self.leaves):
                piece = await connection.read(1 if self.slow else 4096)
                if not piece:
                    return
                self.read += piece
                if self.slow:
                    await asyncio.sleep(1)
            watch.gone(self.number)
            if abrupt:
                connection.reset()


def draw_crowd(count: int, chance: random.Random) -> list[Client]:
    """Return clients, of which 30% disconnect and 5% hardly read."""
    crowd = [Client(number, _body(number, chance)) for number in range(count)]
    chosen = chance.sample(crowd, round(0.35 * count))
    for client in chosen[: round(0.3 * count)]:
        client.leaves = chance.choice([0, 1, chance.randrange(4000), chance.randrange(8000)])
    for client in chosen[round(0.3 * count) :]:
        client.slow = True
    return crowd


def _body(number: int, chance: random.Random) -> dict[str, Any]:
    prompt = [number % 250, number // 250, *(chance.randrange(250) for _ in range(chance.choice([2, 8, 40])))]
    usual = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    drawn = {"temperature": 0} if chance.random() < 0.5 else {"seed": chance.getrandbits(32)}
    return {**usual, **drawn, "max_tokens": chance.randrange(16, 60), "logprobs": chance.choice([None, None, 2])}


def content(reply: Reply) -> list[Any]:
    """Return the content of a stream, without its id and its date."""
    named = [{key: value for key, value in chunk.items() if key not in ("id", "created")} for chunk in reply.chunks]
    for chunk in named:
        if chunk.get("usage"):
            del chunk["usage"]["prompt_tokens_details"]  # the content of the cache depends on other requests
    return named


@pytest.mark.parametrize("count", sizes(60, 500))
def test_each_client_of_a_crowd_gets_its_own_text(
    serve: Any, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Clients that stay get every byte that they get alone; memory of the others is free within two steps."""
    chance = random.Random(count)
    engine = AsyncEngine(
        checkpoints.target, draft_model=checkpoints.near, dtype="float32", max_num_seqs=48, max_waiting=count
    )
    server: LiveServer = serve(engine).ready()
    crowd = draw_crowd(count, chance)
    stay = [client for client in crowd if client.leaves is None and not client.slow]
    alone = asyncio.run(_one_by_one(server.url, [client.body for client in stay]))
    watch, over = Watch(engine, monkeypatch), asyncio.Event()

    async def come_all() -> None:
        tasks = {
            client.number: asyncio.create_task(
                client.run(server.url, watch, 2 * chance.random(), chance.random() < 0.5, over)
            )
            for client in crowd
        }
        await asyncio.gather(*(tasks[client.number] for client in stay))
        over.set()
        await asyncio.gather(*tasks.values())

    asyncio.run(come_all())
    for client, expected in zip(stay, alone, strict=True):
        assert content(decoded(bytes(client.read))) == content(expected), client.body
    server.until(lambda: server.state.admission.count == 0)
    server.until(lambda: not core(engine).has_unfinished())
    assert_nothing_is_held(core(engine))
    closed, noticed = sorted(watch.since_close), sorted(watch.since_notice)
    print(
        f"{count} streams, {len(stay)} stayed, {engine.metrics.aborted} aborted; steps that still had their requests:"
        f" after the server noticed at most {noticed[-1]}, after the client closed at most {closed[-1]},"
        f" {sum(each > 2 for each in closed)} of {len(closed)} more than 2"
    )
    assert engine.metrics.aborted > 0.1 * count
    assert noticed[-1] <= 1
    assert closed[int(0.9 * len(closed))] <= 2  # all of them where nothing else uses the processor


async def _one_by_one(url: str, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
    return [await exchange(url, encoded("/v1/completions", body)) for body in bodies]


SEQUENCES, WAITING = 8, 16
TOKENS = 400
WORK = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


class Flood:
    """Requests at a steady rate, and the server's replies, queue and memory meanwhile."""

    def __init__(self, server: ServerProcess, chance: random.Random) -> None:
        self._server, self._chance = server, chance
        self.replies: list[Reply] = []
        self.waiting: list[float] = []
        self.memory: list[int] = []

    async def ask(self) -> Reply:
        """Send one request."""
        prompt = [self._chance.randrange(250) for _ in range(20)]
        reply = await exchange(self._server.url, encoded("/v1/completions", {**WORK, "prompt": prompt}))
        self.replies.append(reply)
        return reply

    async def capacity(self, seconds: float) -> float:
        """Return how many requests the server completes in a second."""
        until, started = time.monotonic() + seconds, time.monotonic()

        async def some() -> None:
            while time.monotonic() < until:
                assert (await self.ask()).status == 200

        await asyncio.gather(*(some() for _ in range(SEQUENCES + 4)))
        return len(self.replies) / (time.monotonic() - started)

    async def flood(self, rate: float, seconds: float) -> None:
        """Send requests at this rate, in requests per second, and watch."""
        begun = time.monotonic()
        watching = asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
                group.create_task(self.ask())
        watching.cancel()

    async def _watch(self) -> None:
        while True:
            page = await exchange(self._server.url, encoded("/metrics"))
            lines = page.body.decode().splitlines()
            self.waiting += [float(each.split()[-1]) for each in lines if "num_requests_waiting{" in each]
            self.memory.append(self._server.memory)
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("seconds", sizes(2, 60))
def test_ten_times_capacity_is_refused_at_once(serve_process: Any, seconds: int) -> None:
    limits = ["--max-num-seqs", str(SEQUENCES), "--max-waiting", str(WAITING)]
    limits += ["--kv-memory", "16MiB"]  # soon in full use, so that later growth is not the cache
    suffix = {"method": "suffix", "suffix_decoding_corpus_tokens": 16 * TOKENS}  # nor the store of finished requests
    members = [suffix, "prompt_lookup", "draft_model"]
    limits += ["--speculative-config", json.dumps({"method": "fallback", "model": "demo", "members": members})]
    server: ServerProcess = serve_process("demo", *limits).ready()
    flood = Flood(server, random.Random(0))
    capacity = asyncio.run(flood.capacity(1 if seconds < 10 else 8))
    flood.replies.clear()
    lasting = max(seconds, 4 * (SEQUENCES + WAITING) / (10 * capacity))  # fills the queue of a slow server
    asyncio.run(flood.flood(10 * capacity, lasting))
    served = [reply for reply in flood.replies if reply.status == 200]
    refused = sorted(reply.seconds for reply in flood.replies if reply.status == 429)
    assert len(served) + len(refused) == len(flood.replies)
    assert all(reply.value["usage"]["completion_tokens"] == TOKENS for reply in served)
    print(
        f"capacity {capacity:.1f}/s; {len(served)} served, {len(refused)} refused: at most {refused[-1]:.3f} s,"
        f" median {statistics.median(refused):.4f} s; at most {max(flood.waiting):.0f} waited;"
        f" memory {[each >> 20 for each in flood.memory[:: max(1, len(flood.memory) // 10)]]} MiB"
    )
    assert max(flood.waiting) <= WAITING
    assert len(served) > 0.3 * capacity * lasting
    assert len(refused) > len(served)
    assert statistics.median(refused) < 0.1 * statistics.median(reply.seconds for reply in served)
    if seconds == 60:  # bounds that other programs can break
        assert statistics.median(refused) < 0.1
        assert refused[int(0.99 * len(refused))] < 1
    early, late = flood.memory[len(flood.memory) // 4], max(flood.memory[-len(flood.memory) // 4 :])
    assert late - early < 8 * 2**20
    assert server.http.post("/v1/completions", json={**WORK, "prompt": "a"}).status_code == 200
