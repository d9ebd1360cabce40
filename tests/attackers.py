"""Clients that try to stop a server: `python tests/attackers.py ATTACK URL ADDRESS COUNT`, until its input ends.

The attacks come from a process of their own, so that they take no time from a test's interpreter, and from an address
of their own (of this machine: 127.0.0.2 and so on). Needs nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MEBIBYTE = 2**20
MESSAGES = '"messages": [{"role": "user", "content": "a"}]'
LONG: dict[str, str] = {  # by surface, the fields of a long answer
    "/v1/completions": '"prompt": "a", "max_tokens": 900, "ignore_eos": true',
    "/v1/chat/completions": f'{MESSAGES}, "max_tokens": 900, "ignore_eos": true',
    "/v1/responses": '"input": "a", "max_output_tokens": 900, "ignore_eos": true, "store": true',
    "/v1/messages": f'{MESSAGES}, "max_tokens": 900, "ignore_eos": true',
    "/infill": '"input_prefix": "a", "input_suffix": "", "n_predict": 900, "ignore_eos": true',
}


def streamed(path: str) -> bytes:
    """Return a request for a long stream."""
    body = f'{{{LONG[path]}, "stream": true}}'.encode()
    head = HEAD.replace(b"/v1/completions", path.encode()) + b"Content-Length: %d\r\n\r\n" % len(body)
    return head + body


STREAMS = itertools.cycle([streamed(path) for path in LONG])


async def silent(_: Reader, __: Writer) -> None:
    """Send nothing."""
    await asyncio.sleep(3600)


async def slow(_: Reader, writer: Writer) -> None:
    """Send a head that never ends, a byte at a time."""
    for byte in HEAD + b"X-Long: " + b"x" * 3600:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(1)


async def slow_body(_: Reader, writer: Writer) -> None:
    """Send a large body a byte at a time."""
    writer.write(HEAD + b"Content-Length: 4000000\r\n\r\n")
    for _ in range(3600):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(1)


async def churn(_: Reader, writer: Writer) -> None:
    """Connect and disconnect."""
    writer.transport.abort()


async def asks(reader: Reader, writer: Writer) -> None:
    """Ask the cheapest questions, without a pause."""
    while True:
        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")


async def leaves(_: Reader, writer: Writer) -> None:
    """Ask and leave at once."""
    writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await writer.drain()


async def many_headers(reader: Reader, writer: Writer) -> None:
    """Send heads of many tiny headers."""
    writer.write(b"GET /version HTTP/1.1\r\nHost:localhost\r\n" + b"a:\n" * 10_000 + b"\r\n")
    await reader.read()


async def tiny_chunks(reader: Reader, writer: Writer) -> None:
    """Send a body in chunks of one byte."""
    writer.write(CHUNKED + b"1\r\n \r\n" * (MEBIBYTE // 6))
    await reader.read()


async def trailers(reader: Reader, writer: Writer) -> None:
    """Send many trailers after a body."""
    writer.write(CHUNKED + b"1\r\n \r\n0\r\n" + b"a:\n" * (MEBIBYTE // 3))
    await reader.read()


async def held_bodies(_: Reader, writer: Writer) -> None:
    """Send bodies of almost the most bytes, but for their ends."""
    writer.write(HEAD + b"Content-Length: 4194304\r\n\r\n" + b" " * (4 * MEBIBYTE - 1))
    await writer.drain()
    await asyncio.sleep(3600)


async def unread(_: Reader, writer: Writer) -> None:
    """Ask for much and read nothing."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        await writer.drain()
        await asyncio.sleep(1)


async def endless(reader: Reader, writer: Writer) -> None:
    """Ask for long answers."""
    request = next(STREAMS)
    writer.write(request)
    while await reader.read(65_536):
        writer.write(request)  # before the first answer has ended, so that the connection never waits


async def left_streams(reader: Reader, writer: Writer) -> None:
    """Ask each surface for a long answer, and leave after its beginning."""
    writer.write(next(STREAMS))
    await reader.read(1000)


async def unread_streams(_: Reader, writer: Writer) -> None:
    """Ask each surface for a long answer, and read nothing."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(next(STREAMS))
    await writer.drain()
    await asyncio.sleep(3600)


async def malformed(reader: Reader, writer: Writer) -> None:
    """Send requests that are not HTTP, or ask for another protocol."""
    for data in (
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"\0\r\n\r\n",
    ):
        writer.write(data)
        await asyncio.sleep(0.01)
    await reader.read()


ATTACKS: dict[str, Callable[[Reader, Writer], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        *(silent, slow, slow_body, churn, asks, leaves, many_headers),
        *(tiny_chunks, trailers, held_bodies, unread, endless, left_streams, unread_streams, malformed),
    )
}


async def attack(name: str, url: str, address: str, count: int) -> None:
    """Keep this many connections at it: who is thrown out comes again."""
    where = urlsplit(url)

    async def again_and_again() -> None:
        while True:
            with suppress(OSError, EOFError):
                reader, writer = await asyncio.open_connection(where.hostname, where.port, local_addr=(address, 0))
                left = asyncio.ensure_future(_until_closed(reader, name))
                with contextlib.closing(writer):
                    work = asyncio.ensure_future(ATTACKS[name](reader, writer))
                    await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
                    for each in (work, left):
                        each.cancel()
                        with suppress(OSError, EOFError, asyncio.CancelledError):
                            await each
            await asyncio.sleep(0.01)

    await asyncio.gather(*(again_and_again() for _ in range(count)))


async def _until_closed(reader: Reader, name: str) -> None:
    if name in ("silent", "slow", "slow_body", "held_bodies"):
        await reader.read()
    else:
        await asyncio.sleep(3600)


@contextmanager
def attacked(name: str, url: str, address: str, count: int) -> Iterator[None]:
    """Attack a server while the block runs."""
    command = [sys.executable, __file__, name, url, address, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    asyncio.run(attack(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
