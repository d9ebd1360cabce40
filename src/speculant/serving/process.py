"""A process that serves: its settings, the application with its engine, and requests from inside the process.

Requests from inside need no socket: they are those of batches, and of replicas of a cluster.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from speculant.serving.http.clients import USER

if TYPE_CHECKING:
    from fastapi import FastAPI

    from speculant.engine import AsyncEngine
    from speculant.serving.options import ServerOptions

_SWITCH = 0.5e-3  # seconds for which busy threads make another one wait: requests without end would delay all steps


def load_engine(values: Mapping[str, Any]) -> AsyncEngine:
    """Load the engine of a process that serves. values: its arguments. Raises the errors of `AsyncEngine`.

    Torch is imported here, so that its threads start on the cores that the process has by now.
    """
    from speculant.engine import AsyncEngine

    engine = AsyncEngine(**values)
    sys.setswitchinterval(_SWITCH)
    gc.collect()
    gc.freeze()  # collections that examine loaded objects would delay requests
    return engine


def return_memory() -> None:
    """Free what is left of engines that were shut down, and return it to the system."""
    gc.unfreeze()  # engines refer to themselves, and were frozen when they were loaded
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def load_app(values: Mapping[str, Any], options: ServerOptions, names: Sequence[str]) -> FastAPI:
    """Return an application whose engine is loaded. names: the model's names for clients."""
    engine = load_engine(values)
    from speculant.serving.app import make_app

    return make_app(engine, options, names)


_WAITING = 16  # messages that may wait for a slow reader


@dataclass(frozen=True)
class InsideRequest:
    """One HTTP request. headers: their names in lower case. client: the address of the client that sent it.

    user: a digest of the name that a trusted front end gave the user; None = it named nobody.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    query: bytes = b""
    client: str = "127.0.0.1"
    user: str | None = None


@dataclass(frozen=True)
class ResponseHead:
    """The beginning of a response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


async def responses(app: ASGIApp, request: InsideRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Yield the head of an application's response, then the pieces of its body as they are sent.

    Closing the iterator is what a client's disconnect is for a server: the application stops its work. Raises what the
    application raises, and ConnectionError if it ends without a whole response.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING)
    gone = asyncio.Event()
    waiting = [request.body]

    async def receive() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            await sent.put(message)

    async def work() -> None:
        try:
            await app(_scope(request), receive, send)
        finally:
            if not gone.is_set():
                await sent.put(None)

    task = asyncio.create_task(work())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield ResponseHead(
                    message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"])
                )
                continue
            if message["body"]:
                yield bytes(message["body"])
            if not message.get("more_body", False):
                return
        await task
        raise ConnectionError("the application ended without a whole response")
    finally:
        gone.set()
        while not sent.empty():
            sent.get_nowait()  # a full queue would hold the application up
        await asyncio.gather(task, return_exceptions=True)


async def whole_response(app: ASGIApp, request: InsideRequest) -> tuple[ResponseHead, bytes]:
    """Return an application's response in one piece; cancelling this stops its work."""
    head: ResponseHead | None = None
    body = bytearray()
    async for piece in responses(app, request):
        if isinstance(piece, ResponseHead):
            head = piece
        else:
            body += piece
    assert head is not None, "a body came before its head"
    return head, bytes(body)


def _scope(request: InsideRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": (request.client, 0),
        "server": ("inside", 0),
        "state": {},
        **({} if request.user is None else {USER: request.user}),
    }
