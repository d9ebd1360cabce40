"""Work for a client ends when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads a response."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client goes away before, cancel it and raise ClientGoneError.

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
