"""Requests to an application from inside its process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from starlette.types import Message, Receive, Scope, Send

from speculant.serving import InsideRequest, ResponseHead, responses, whole_response

REQUEST = InsideRequest("POST", "/echo", b"body", ((b"x-name", b"value"),), b"a=1", "10.0.0.7")


def _start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"x-app", b"yes")]}


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Endless:
    """An application that streams until its client is gone."""

    def __init__(self) -> None:
        self.sent, self.saw_disconnect = 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        watching = asyncio.create_task(receive())
        await send(_start())
        while not watching.done():
            await send(_body(b"x"))
            self.sent += 1
            await asyncio.sleep(0)
        self.saw_disconnect = watching.result()["type"] == "http.disconnect"


def test_request_reaches_the_application_whole() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        message = await receive()
        await send(_start(201))
        await send(_body(message["body"]))
        await send(_body(b" end", more=False))

    head, body = asyncio.run(whole_response(app, REQUEST))
    assert (head, body) == (ResponseHead(201, ((b"x-app", b"yes"),)), b"body end")
    assert (seen[0]["method"], seen[0]["path"], seen[0]["query_string"]) == ("POST", "/echo", b"a=1")
    assert (seen[0]["headers"], seen[0]["client"]) == ([(b"x-name", b"value")], ("10.0.0.7", 0))


def test_closing_is_a_disconnect() -> None:
    app = Endless()

    async def read_three() -> None:
        async with aclosing(responses(app, REQUEST)) as pieces:
            for _ in range(3):
                await anext(pieces)

    asyncio.run(asyncio.wait_for(read_three(), 10))
    assert app.saw_disconnect


def test_slow_reader_holds_the_application_up() -> None:
    app = Endless()

    async def read_late() -> int:
        async with aclosing(responses(app, REQUEST)) as pieces:
            await anext(pieces)
            for _ in range(200):
                await asyncio.sleep(0)
            return app.sent

    assert asyncio.run(asyncio.wait_for(read_late(), 10)) < 40


def test_error_of_the_application_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(_start())
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(whole_response(app, REQUEST))


def test_response_without_an_end_is_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(_start())
        await send(_body(b"half"))

    with pytest.raises(ConnectionError, match="without a whole response"):
        asyncio.run(whole_response(app, REQUEST))


def test_cancelled_caller_stops_the_application() -> None:
    app = Endless()

    async def cancel() -> None:
        task = asyncio.create_task(whole_response(app, REQUEST))
        while app.sent < 5:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(cancel(), 10))
    assert app.saw_disconnect
