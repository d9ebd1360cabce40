"""What a client gets: errors in the shape of its API, JSON documents, events, and responses sent while they are made.

An error has no paths or memory addresses of the server. A response ends when its client disconnects or reads slowly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from speculant.errors import (
    CapacityError,
    ConfigError,
    ContextFullError,
    EngineClosedError,
    EngineDeadError,
    ModelError,
    RequestError,
    SpeculantError,
)

MAX_MESSAGE = 1000  # characters; a message may quote data of the client
CONTEXT_FULL = "context_length_exceeded"  # OpenAI's code, by which agents know that they have to shorten a conversation
RETRY_AFTER = MappingProxyType({"retry-after": "1"})
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\\S+")
_WORD = re.compile(r"(?<![\w.-])[a-z]\w*(?![\w-])")
_NAME = re.compile(r"\w+[=\[]|[a-z]*_")  # a message begins with a field's name
_NOUNS = frozenset({"prompt", "source", "method", "verification"})  # messages use these field names as nouns
_OF_REQUESTS = RequestError, ConfigError, ModelError  # the client has to change its request
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPICS = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error with an HTTP status, and the fields that OpenAI's clients read: message, type, param, code.

    Its message consists of fixed text and of data from the client, so it contains no path of the server.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, _shortened(message), param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The error's type in OpenAI's words."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the body of the response, or the data of an error event, in OpenAI's shape."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_for(self, scope: Scope) -> dict[str, Any]:
        """Return the same in the shape that the client of a request reads."""
        if not is_anthropic(scope):
            return self.body()
        kind = _ANTHROPICS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        error = {"type": kind, "message": self.message, **details}
        return {"type": "error", "error": error, "request_id": scope.get(REQUEST_ID)}


def refusal(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of status 400: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str) -> ApiError:
    """Return an error of status 429: the request may be sent again later."""
    return ApiError(429, message, code="rate_limit_exceeded", headers=RETRY_AFTER)


def unavailable(message: str, code: str) -> ApiError:
    """Return an error of status 503: the server does not accept requests now."""
    return ApiError(503, message, code=code, headers=RETRY_AFTER)


def timed_out(message: str) -> ApiError:
    """Return an error of status 504: a deadline has passed."""
    return ApiError(504, message, code="timeout")


Sent = Callable[[str], str | None]  # from a setting's name to the field that set it; None = no field did


def _nothing(_: str) -> None:
    return None


def api_error(error: Exception, sent_as: Sent = _nothing) -> ApiError:
    """Return the error for a client. It has no details of errors other than SpeculantError.

    sent_as: the body's method of that name, by which an error names a field as the client sent it.
    """
    if isinstance(error, ApiError):
        return _as_sent(error, sent_as)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "The engine has failed; this server can't serve requests any more.", code="engine_failed")
    if isinstance(error, EngineClosedError):
        return unavailable("The server is shutting down.", "shutting_down")
    if isinstance(error, CapacityError):
        return overloaded(sentence(error, sent_as))
    if isinstance(error, SpeculantError):
        status = 400 if isinstance(error, _OF_REQUESTS) else 500
        code = CONTEXT_FULL if isinstance(error, ContextFullError) else None
        return _as_sent(ApiError(status, sentence(error, sent_as), code=code), sent_as)
    return ApiError(500, "The server failed to process this request.", code="internal_error")


def _as_sent(error: ApiError, sent_as: Sent) -> ApiError:
    """Return an error with the names of fields as the client sent them."""
    if error.status != 400:
        return error
    sent: dict[str, str] = {}  # by the name in the message
    for word in _WORD.finditer(error.message):
        if _may_be_field(word) and (field := sent_as(word[0])) is not None:
            sent.setdefault(word[0], field)
    named = _WORD.sub(lambda word: word[0] if word[0] in _NOUNS else sent.get(word[0], word[0]), error.message)
    param = next(iter(sent.values()), None) if error.param is None else sent_as(error.param) or error.param
    return ApiError(400, named, param=param, code=error.code, headers=error.headers)


def _may_be_field(word: re.Match[str]) -> bool:
    """Whether a word of a message is the name of a field, if a field has that name, and not an English word."""
    return word.start() == 0 or "_" in word[0] or word[0] in _NOUNS


def scrub(text: str) -> str:
    """Return a message without memory addresses and absolute paths, shortened to MAX_MESSAGE."""
    return _PATH.sub("[path]", _ADDRESS.sub("[address]", _shortened(text)))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def sentence(error: SpeculantError, sent_as: Sent = _nothing) -> str:
    """Return an error's problem and fix for a client."""
    problem = error.problem if len(error.problem) <= MAX_MESSAGE // 2 else error.problem[: MAX_MESSAGE // 2] + "..."
    first = _WORD.match(problem)
    if not _NAME.match(problem) and not (first and sent_as(first[0])):
        problem = f"{problem[:1].upper()}{problem[1:]}"
    return scrub(f"{problem}. Fix: {error.fix}")


DONE = b"data: [DONE]\n\n"
MANY = 32  # a list of more items is written item by item
LONGEST_TURN = 2e-3  # seconds for which a long document blocks the loop and the interpreter's lock at a time
PAUSE = 1e-3  # seconds between two turns; with 0 a thread that waits for the lock would not get it


@dataclass(frozen=True)
class Deferred:
    """A part of a document that is made when it is written, because many of them take time."""

    make: Callable[[], Any]


def encode(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. Lone surrogates, which UTF-8 can't encode, are escaped."""
    try:
        return _dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return _dumps(value, ensure_ascii=True).encode("ascii")


def encode_long(value: Any) -> bytes:
    """Return the same as `encode`, written in parts: other threads run in between."""
    return b"".join(_parts(value))


async def encode_in_parts(value: Any, longest_turn: float = LONGEST_TURN, pause: float = PAUSE) -> bytes:
    """Return the same as `encode`. A long list is written item by item, with pauses for other work."""
    return b"".join([piece async for piece in encoded_pieces(value, longest_turn, pause)])


async def encoded_pieces(
    value: Any, longest_turn: float = LONGEST_TURN, pause: float = PAUSE
) -> AsyncGenerator[bytes, None]:
    """Yield the same as `encode` in pieces, each made in one turn of the event loop, with pauses for other work."""
    written, began = list[bytes](), time.perf_counter()
    for part in _parts(value):
        written.append(part)
        if time.perf_counter() - began > longest_turn:
            yield b"".join(written)
            await asyncio.sleep(pause)
            written, began = list[bytes](), time.perf_counter()
    yield b"".join(written)


def _parts(value: Any) -> Iterator[bytes]:
    """Yield a document in parts: the values of its objects, and the items of its lists."""
    if isinstance(value, dict):
        for place, (key, each) in enumerate(value.items()):
            yield (b"," if place else b"{") + encode(str(key)) + b":"
            yield from _parts(each)
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        for place, each in enumerate(value if len(value) <= MANY else _grouped(value)):
            yield b"," if place else b"["
            yield from _parts(each) if len(value) <= MANY else [each]
        yield b"]" if value else b"[]"
    else:
        yield encode(value)


def _grouped(items: list[Any]) -> Iterator[bytes]:
    """Yield the items of a long list, MANY together where they are plain numbers or short texts."""
    for start in range(0, len(items), MANY):
        group = items[start : start + MANY]
        if all(isinstance(each, int) or (isinstance(each, str) and len(each) < MANY) for each in group):
            yield encode(group)[1:-1]
        else:
            yield from map(encode, group)


def _dumps(value: Any, ensure_ascii: bool) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"), default=_made)


def _made(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.make()
    raise TypeError(f"{type(value).__name__} can't be written as JSON")


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with a JSON document."""
    named = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return named + b"data: " + encode(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON document."""
    return Response(encode(value), status, dict(headers or {}), media_type="application/json")


def is_anthropic(scope: Scope) -> bool:
    """Whether the client of a request reads Anthropic's shapes."""
    path: str = scope["path"]
    if path.startswith(_MODELS):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def request_id_headers(scope: Scope) -> tuple[str, ...]:
    """Return the names of the headers that have a request's id in its response."""
    return ("x-request-id", "request-id") if is_anthropic(scope) else ("x-request-id",)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response of an error to a request."""
    return json_response(error.body_for(scope), error.status, error.headers)


def error_event(error: ApiError, scope: Scope, number: int | None = None) -> bytes:
    """Return the last event of a stream that failed. number: of the event, in a stream that numbers its events."""
    if is_anthropic(scope):
        return event(error.body_for(scope), "error")
    if number is None:
        return event(error.body())
    value = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return event({**value, "sequence_number": number}, "error")


def raw_error(error: ApiError, scope: Scope | None = None) -> bytes:
    """Return the bytes of an error's response, after which the connection is closed. scope: the request's, if known."""
    response = error_response(error, _UNKNOWN if scope is None else scope)
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode("ascii"), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


logger = logging.getLogger(__name__)

RECORD = "speculant.record"  # in a scope: the request's record, if it has one
REQUEST_ID = "speculant.request_id"  # in a scope: X-Request-Id
_MESSAGES, _MODELS = "/v1/messages", "/v1/models"
_UNKNOWN: Scope = {"path": ""}
ABORT = "speculant.abort"  # in a scope's extensions: closes the connection at once; unsent data is lost
T = TypeVar("T")
WHOLE = 2**20  # bytes of a document that is sent at once, with its length
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def document_response(value: Any, send_timeout: float | None) -> Response:
    """Return a response with a JSON document. A large one is sent in pieces, so that it is never in memory as a whole.

    With log-probabilities of 128 answers a document may have 100 MB.
    """
    pieces, begun, size = encoded_pieces(value), list[bytes](), 0
    async for piece in pieces:
        begun.append(piece)
        size += len(piece)
        if size > WHOLE:
            return EventStream(_following(begun, pieces), send_timeout, {"content-type": "application/json"})
    return Response(b"".join(begun), media_type="application/json")


async def _following(begun: Sequence[bytes], pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        for piece in begun:
            yield piece
        async for piece in pieces:
            yield piece


class EventStream(Response):
    """Sends events, or pieces of another kind, as they are made.

    Data that a client does not read fills the buffers of the client's system and of the connection. Then the next event
    waits. If it waits longer than `send_timeout` seconds (None = for ever), the connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], send_timeout: float | None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({**_STREAM_HEADERS, **(headers or {})})
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


def note_end(scope: Scope, end: str) -> None:
    """Note why a response ended, if the request has a record."""
    record = scope.get(RECORD)
    if record is not None:
        record.end = end


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
