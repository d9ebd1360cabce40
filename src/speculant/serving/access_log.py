"""Records of requests, and the access log: a line for each request, when its response has ended.

A record is kept only if the access log or traces are switched on. A line has no key, no text of a prompt or an answer,
and no query. Fields that a client chooses are bounded. In the form "text" they have no blanks, quotes or control
characters, so that nobody can forge a line or a field.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculant.engine import StreamPiece
from speculant.params import SamplingParams
from speculant.serving.http.clients import client_of
from speculant.types import RequestOutput

RECORD = "speculant.record"  # in a scope: the request's record, if it has one
REQUEST_ID = "speculant.request_id"  # in a scope: X-Request-Id


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request. Times are readings of `time.perf_counter`, in seconds.

    time_ns: the time of `started`, since the epoch. params: set for a request that generates. outputs: the results of
    the prompts that came to their end. sent: bytes of the response's body. end: why the response ended: complete,
    disconnected (by the client), unread (by a slow client), aborted (cancelled by the server) or error; empty = it has
    not ended. parts: how many have to end, see `part_ended`: the response, and a generation that goes on in the
    background.
    """

    started: float = field(default_factory=time.perf_counter)
    time_ns: int = field(default_factory=time.time_ns)
    params: SamplingParams | None = None
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    accepted_tokens: int = 0
    first_token: float | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    status: int = 0
    sent: int = 0
    finished: float = 0.0
    end: str = ""
    is_whole: bool = False
    parts: int = 1
    report: Callable[[], None] = lambda: None

    def part_ended(self) -> None:
        """Count a part that has ended; after the last one the record is complete, and reported."""
        self.parts -= 1
        if not self.parts:
            self.finish()
            self.report()

    def count(self, piece: StreamPiece, now: float) -> None:
        """Count a piece that arrived at `now`."""
        if piece.token is not None:
            if self.first_token is None:
                self.first_token = now
            self.generated_tokens += 1
            self.accepted_tokens += piece.drafted
        if piece.output is not None:
            self.outputs.append(piece.output)

    def note(self, message: Message) -> None:
        """Count a message of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)

    def finish(self) -> None:
        """Note that the response has ended."""
        self.finished = time.perf_counter()
        if self.end == "error" and 400 <= self.status < 500:  # it is refused, which is no failure
            self.end = "complete"
        if self.end:
            return
        if not self.is_whole:
            self.end = "disconnected"
        else:
            self.end = "complete" if self.status < 500 else "error"

    @property
    def seconds(self) -> float:
        """Time from the request to the end of its response."""
        return self.finished - self.started


Report = Callable[[Scope, RequestRecord], None]


class RequestRecords:
    """Keeps a record of each request, and reports it when the response and its generation have ended."""

    def __init__(self, app: ASGIApp, reports: Sequence[Report]) -> None:
        self._app, self._reports = app, reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord(report=lambda: self._report(scope, record))

        async def send_noted(message: Message) -> None:
            record.note(message)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            record.end = "aborted"
            raise
        except Exception:
            record.status, record.end = record.status or 500, "error"  # an outer layer answers
            raise
        finally:
            record.part_ended()

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        for report in self._reports:
            report(scope, record)


def note_end(scope: Scope, end: str) -> None:
    """Note why a response ended, if the request has a record."""
    record = scope.get(RECORD)
    if record is not None:
        record.end = end


def note_background(scope: Scope, task: asyncio.Task[None]) -> None:
    """Report the request, if it has a record, no sooner than this task has ended."""
    record: RequestRecord | None = scope.get(RECORD)
    if record is not None:
        record.parts += 1
        task.add_done_callback(lambda _: record.part_ended())


logger = logging.getLogger(__name__)

_MOST_PATH, _MOST_METHOD = 200, 16  # characters that are logged
_DIGEST = 8  # characters of a key's digest: enough to tell clients apart, too few to test guesses of a key
_UNSAFE = re.compile(r'[^\x21-\x7e]|["\\]')


class AccessLog:
    """Writes the lines. form: "text" or "json"."""

    def __init__(self, form: str, write: Callable[[str], object] = logger.info) -> None:
        self._line, self._write = FORMS[form], write

    def __call__(self, scope: Scope, record: RequestRecord) -> None:
        """Write the line of a request that has ended."""
        self._write(self._line(_fields(scope, record)))


def _fields(scope: Scope, record: RequestRecord) -> dict[str, Any]:
    """Return a line's fields; None = there is no such figure."""
    first, generates = record.first_token, record.params is not None
    return {
        "time": datetime.fromtimestamp(record.time_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "client": _client(scope),
        "method": _bounded(scope["method"], _MOST_METHOD),
        "path": _bounded((scope.get("raw_path") or b"").decode("latin-1"), _MOST_PATH),
        "status": record.status or None,
        "bytes": record.sent,
        "seconds": round(record.seconds, 4),
        "first_token_seconds": None if first is None else round(first - record.started, 4),
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens if generates else None,
        "accepted_tokens": record.accepted_tokens if generates else None,
        "end": record.end,
        "request_id": scope.get(REQUEST_ID),
    }


def _client(scope: Scope) -> str:
    """Return the client's address, or the beginnings of the digests of its key and its user."""
    kind, _, name = client_of(scope).partition(":")
    if kind == "address":
        return name
    return "/".join(part[: part.index(":") + 1 + _DIGEST] for part in client_of(scope).split("/"))


def _bounded(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _text(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_plain(value)}" for name, value in fields.items())


def _plain(value: Any) -> str:
    """Return a value without blanks, quotes and control characters; they are written as in URLs."""
    if value is None or value == "":
        return "-"
    return _UNSAFE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), str(value))


FORMS: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType({"text": _text, "json": json.dumps})
