"""Responses that are sent while they are made, and end when their client disconnects or reads too slowly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speculant.serving.records import REQUEST_ID, note_end
from speculant.serving.wire import encoded_pieces

logger = logging.getLogger(__name__)

ABORT = "speculant.abort"  # in a scope's extensions: closes the connection at once; unsent data is lost
T = TypeVar("T")
WHOLE = 2**20  # bytes of a document that is sent at once, with its length
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def document_response(value: Any, send_timeout: float | None) -> Response:
    """Return a response with a JSON document. A large one is sent in pieces, so that it is never in memory as a whole.

    With log-probabilities of 128 answers a document may have 100 MB.
    """
    pieces, begun, size = encoded_pieces(value), list[bytes](), 0
    async for piece in pieces:
        begun.append(piece)
        size += len(piece)
        if size > WHOLE:
            return DocumentStream(_following(begun, pieces), send_timeout)
    return Response(b"".join(begun), media_type="application/json")


async def _following(begun: Sequence[bytes], pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        for piece in begun:
            yield piece
        async for piece in pieces:
            yield piece


class EventStream(Response):
    """Sends events as they are made.

    Data that a client does not read fills the buffers of the client's system and of the connection. Then the next event
    waits. If it waits longer than `send_timeout` seconds (None = for ever), the connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], send_timeout: float | None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({**_HEADERS, **(headers or {})})
        self._events, self._send_timeout = events, send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, see ASGI."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            note_end(scope, "disconnected")
            logger.info("request %s: the client disconnected while its answer was streamed", scope.get(REQUEST_ID))
        except TimeoutError:
            note_end(scope, "unread")
            logger.warning(
                "request %s: dropped a client that read nothing of its answer for %s s",
                scope.get(REQUEST_ID),
                self._send_timeout,
            )
            abort = scope.get("extensions", {}).get(ABORT)
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # lets the connection notice it

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._send(send, head)
            async for data in events:
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Mapping[str, object]) -> None:
        async with asyncio.timeout(self._send_timeout):
            await send(dict(message))


class DocumentStream(EventStream):
    """Sends the pieces of a JSON document as they are made."""

    media_type = "application/json"


class ClientGoneError(Exception):
    """The client has closed its connection, so a response would not be read."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects before, cancel it and raise ClientGoneError.

    The request's body must have been read. Nothing is polled.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
