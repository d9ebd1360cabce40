"""The bytes of responses: JSON documents and server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from speculant.serving.errors import ApiError

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


async def encode_in_parts(value: Any) -> bytes:
    """Return the same as `encode`. A long list is written item by item, with pauses for other work."""
    return b"".join([piece async for piece in encoded_pieces(value)])


async def encoded_pieces(value: Any) -> AsyncGenerator[bytes, None]:
    """Yield the same as `encode` in pieces, each made in one turn of the event loop, with pauses for other work."""
    written, began = list[bytes](), time.perf_counter()
    for part in _parts(value):
        written.append(part)
        if time.perf_counter() - began > LONGEST_TURN:
            yield b"".join(written)
            await asyncio.sleep(PAUSE)
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


def error_response(error: ApiError) -> Response:
    """Return the response of an error."""
    return json_response(error.body(), error.status, error.headers)


def raw_error(error: ApiError) -> bytes:
    """Return the bytes of an error's response, after which the connection is closed."""
    response = error_response(error)
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode("ascii"), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
