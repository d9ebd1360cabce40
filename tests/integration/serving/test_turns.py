"""Turns of clients: however much arrives at once, each turn of the event loop begins little of it."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from speculant import AsyncEngine
from speculant.serving import ChunkCount, Connections, HttpConnection, RoundRobin, ServerOptions, Surroundings
from tests.raw_clients import exchange
from tests.servers import LiveServer, never_loads, serve

__all__ = ["never_loads", "serve"]
GET = b"GET /noted HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n\r\n"


class Iterations:
    """Counts the iterations of an event loop, and what happens in each."""

    def __init__(self, server: LiveServer) -> None:
        self.number, self.happened = 0, Counter[int]()
        assert server.server._loop is not None
        self._loop = server.server._loop
        server.in_loop(self._count)

    def _count(self) -> None:
        self.number += 1
        self._loop.call_soon(self._count)

    def note(self) -> None:
        """Note that something happens now, in the loop."""
        self.happened[self.number] += 1


@pytest.fixture
def server(serve: Any, never_loads: Callable[[], AsyncEngine]) -> LiveServer:
    live: LiveServer = serve(never_loads)
    return live


def test_one_request_begins_in_an_iteration(server: LiveServer) -> None:
    """Requests that have arrived before the answer to the one before them are no exception."""
    iterations = Iterations(server)

    async def noted() -> Response:
        iterations.note()
        return Response(b"noted")

    server.app.add_api_route("/noted", noted)

    async def main() -> list[Any]:
        return await asyncio.gather(*(exchange(server.url, (GET + b"\r\n") * 20 + GET + CLOSE) for _ in range(10)))

    assert [reply.body.count(b"noted") for reply in asyncio.run(main())] == [21] * 10
    assert iterations.happened.total() == 210
    assert max(iterations.happened.values()) == 1


@pytest.mark.parametrize(("size", "status", "parsed"), [(64, 200, 1000), (1, 400, 260)])
def test_many_small_chunks_take_several_turns(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, size: int, status: int, parsed: int
) -> None:
    """Whether they are accepted or refused."""
    iterations, add = Iterations(server), ChunkCount.add
    monkeypatch.setattr(ChunkCount, "add", lambda *given: (iterations.note(), add(*given)))

    async def length(request: Request) -> Response:
        return Response(str(len(await request.body())))

    server.app.add_api_route("/length", length, methods=["POST"])
    head = b"POST /length HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n" + CLOSE
    reply = asyncio.run(exchange(server.url, head + (b"%x\r\n" % size + b"a" * size + b"\r\n") * 1000 + b"0\r\n\r\n"))
    assert reply.status == status
    assert status != 200 or reply.body == b"64000"
    assert iterations.happened.total() >= parsed
    assert max(iterations.happened.values()) <= 32


def test_who_is_dropped_before_its_turn_is_forgotten() -> None:
    """Its socket is closed at once: a process may open few."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns, connections = RoundRobin(loop), Connections(2, 0)
        surroundings = Surroundings(Response(), ServerOptions(), connections, turns)
        with ExitStack() as stack:
            pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(3)]
            made = []
            for _, accepted in pairs:
                made.append(HttpConnection(surroundings, ("192.0.2.1", 1)))
                assert connections.add(made[-1], "192.0.2.1")
                made[-1].begin(accepted, connections)
            assert [turns.has("192.0.2.1", each) for each in made] == [False, True, True]
            pairs[0][0].settimeout(5)
            assert pairs[0][0].recv(1) == b""
            await _until(lambda: made[2].transport is not None)
            assert made[0].transport is None
            for number in range(100):
                turns.add("192.0.2.1", number, lambda: None)
            pairs[2][0].sendall(GET)
            await _until(lambda: turns.has("192.0.2.1", made[2]))
            made[2].drop()
            await asyncio.sleep(0)
            assert (turns.has("192.0.2.1", made[2]), turns.has("192.0.2.1", 99)) == (False, True)
            made[1].drop()

    asyncio.run(main())


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)
