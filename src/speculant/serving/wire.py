"""Bytes on the wire: JSON documents and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from speculant.serving.errors import ApiError

DONE = b"data: [DONE]\n\n"


def encode(value: Any) -> bytes:
    """Return a value as JSON in UTF-8; text that UTF-8 can't hold (single surrogates) is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


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
