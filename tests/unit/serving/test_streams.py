"""Event streams end, and close their source, when the client disconnects or reads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from speculant.serving.wire import ABORT, ClientGoneError, EventStream, while_connected


class Client:
    """The client of a connection: it disconnects after `goes` seconds, and stops reading after `reads` events."""

    def __init__(self, goes: float = 100, reads: int = 100) -> None:
        self._goes, self._reads = goes, reads
        self.had: list[bytes] = []
        self.aborted = False

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(self._goes)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message["more_body"]:
            if len(self.had) == self._reads:
                await asyncio.sleep(100)
            self.had.append(message["body"])

    def abort(self) -> None:
        self.aborted = True


class Source:
    """Makes events, and records whether it was closed."""

    def __init__(self, count: int) -> None:
        self.count, self.closed = count, False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0.001)
                yield b"%d" % number
        finally:
            self.closed = True


def play(source: Source, client: Client, timeout: float | None = 0.05) -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            scope = {"type": "http", "extensions": {ABORT: client.abort}}
            await EventStream(source.events(), timeout)(scope, client.receive, client.send)

    asyncio.run(main())
    assert source.closed


def test_all_events_reach_the_client() -> None:
    client = Client()
    play(Source(20), client)
    assert client.had == [b"%d" % number for number in range(20)]
    assert not client.aborted


def test_a_client_that_stops_reading_is_dropped() -> None:
    client = Client(reads=3)
    play(Source(10_000), client)
    assert client.aborted
    assert len(client.had) == 3


def test_a_client_that_disconnects_ends_the_stream() -> None:
    client = Client(goes=0.05)
    play(Source(10_000), client, None)
    assert 0 < len(client.had) < 1000
    assert not client.aborted


def test_work_is_cancelled_when_its_client_disconnects() -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(5)
        finally:
            ended.append("work")
        return "done"

    async def main() -> None:
        with pytest.raises(ClientGoneError):
            await while_connected(Client(goes=0.01).receive, work())

    asyncio.run(main())
    assert ended == ["work"]


def test_work_returns_or_raises_while_connected() -> None:
    async def fails() -> None:
        raise LookupError

    async def main() -> None:
        assert await while_connected(Client().receive, asyncio.sleep(0.001, "done")) == "done"
        with pytest.raises(LookupError):
            await while_connected(Client().receive, fails())

    asyncio.run(main())
