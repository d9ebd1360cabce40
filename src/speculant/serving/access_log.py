"""The access log: a line for each request, when its response has ended.

A line has no key, no text of a prompt or an answer, and no query. Fields that a client chooses are bounded. In the form
"text" they have no blanks, quotes or control characters, so that nobody can forge a line or a field.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from starlette.types import Scope

from speculant.serving.clients import client_of
from speculant.serving.records import REQUEST_ID, RequestRecord

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
