"""Clients that speak HTTP/1.0 over bare connections: a response ends with its connection."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

DONE = "[DONE]"


@dataclass(frozen=True)
class Reply:
    """A response. status: 0 = there was none. seconds: from the connection to its end."""

    status: int
    headers: bytes
    body: bytes
    seconds: float = 0.0

    @property
    def value(self) -> Any:
        """The document of a response in one piece."""
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of a stream's events, as far as they are complete."""
        *events, _ = self.body.split(b"\n\n")
        lines = [line for event in events for line in event.split(b"\n")]
        return [line[6:].decode("utf-8") for line in lines if line.startswith(b"data: ")]

    @property
    def chunks(self) -> list[Any]:
        """The documents of a stream that has come to its end."""
        *chunks, last = self.events
        assert last == DONE, last
        return [json.loads(chunk) for chunk in chunks]

    @property
    def ended(self) -> bool:
        """Whether a stream came to an end, its last event being [DONE] or an error."""
        events = self.events
        return bool(events) and (events[-1] == DONE or "error" in json.loads(events[-1]))


def encoded(path: str, body: Mapping[str, Any] | bytes | None = None) -> bytes:
    """Return a request: with a body it is a POST."""
    if body is None:
        return f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def decoded(raw: bytes, seconds: float = 0.0) -> Reply:
    """Return the response that was read so far."""
    head, found, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if found else 0
    return Reply(status, head, body, seconds)


def opened(url: str, source: str = "127.0.0.1") -> socket.socket:
    """Return a connection to a server from an address of this machine."""
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=30, source_address=(source, 0))


class Connection:
    """A connection on which one request is sent. Use it under `async with`."""

    def __init__(self, url: str, buffer: int | None = None) -> None:
        """`buffer`: bytes that the system keeps of what was not read yet; None = its own choice."""
        self._address = urlsplit(url)
        self._buffer = buffer

    async def __aenter__(self) -> Connection:
        made = socket.socket()
        if self._buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        made.setblocking(False)
        self.socket = made
        await asyncio.get_running_loop().sock_connect(made, (self._address.hostname, self._address.port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        """Send all of a request."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, most: int = 65_536) -> bytes:
        """Return at most that many bytes of those that have arrived; nothing = the end."""
        return await asyncio.get_running_loop().sock_recv(self.socket, most)

    async def read_all(self) -> bytes:
        """Return everything up to the end, or to where the server breaks off."""
        pieces = []
        with suppress(ConnectionError):
            while piece := await self.read():
                pieces.append(piece)
        return b"".join(pieces)

    def reset(self) -> None:
        """Close the connection at once, as a client does that was killed."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


async def exchange(url: str, request: bytes) -> Reply:
    """Send a request and return its response; one that the server breaks off is as far as it came."""
    started = time.perf_counter()
    async with Connection(url) as connection:
        with suppress(ConnectionError):  # it may answer before it has read all
            await connection.send(request)
        raw = await connection.read_all()
    return decoded(raw, time.perf_counter() - started)
