"""Errors as a client sees them: an HTTP status and OpenAI's shape, without paths or addresses of memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from speculant.errors import CapacityError, EngineClosedError, EngineDeadError, SpeculantError

MAX_MESSAGE = 1000  # characters; a message may quote what the client sent
RETRY_AFTER = MappingProxyType({"retry-after": "1"})
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\\S+")
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error with an HTTP status, and what OpenAI's clients read: message, type, param, code."""

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
        self.status, self.message, self.param, self.code = status, scrub(message), param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The error's type in OpenAI's words."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the body of the response, or the data of an error event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def refusal(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of status 400: the request can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str) -> ApiError:
    """Return an error of status 429: it may be tried again later."""
    return ApiError(429, message, code="rate_limit_exceeded", headers=RETRY_AFTER)


def unavailable(message: str, code: str) -> ApiError:
    """Return an error of status 503: the server does not serve now."""
    return ApiError(503, message, code=code, headers=RETRY_AFTER)


def timed_out(message: str) -> ApiError:
    """Return an error of status 504: a deadline has passed."""
    return ApiError(504, message, code="timeout")


def api_error(error: Exception) -> ApiError:
    """Return what a client is told about an error; of one that is no SpeculantError, nothing but that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, "The engine has failed; this server can't serve requests any more.", code="engine_failed")
    if isinstance(error, EngineClosedError):
        return unavailable("The server is shutting down.", "shutting_down")
    if isinstance(error, CapacityError):
        return overloaded(_sentence(error))
    if isinstance(error, SpeculantError):
        return ApiError(400 if isinstance(error, ValueError) else 500, _sentence(error))
    return ApiError(500, "The server failed to process this request.", code="internal_error")


def scrub(text: str) -> str:
    """Return a message without addresses of memory and absolute paths, and not longer than MAX_MESSAGE."""
    cut = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
    return _PATH.sub("[path]", _ADDRESS.sub("[address]", cut))


def _sentence(error: SpeculantError) -> str:
    problem = error.problem if len(error.problem) <= MAX_MESSAGE // 2 else error.problem[: MAX_MESSAGE // 2] + "..."
    return f"{problem[:1].upper()}{problem[1:]}. Fix: {error.fix}"
