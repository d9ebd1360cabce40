"""Errors as a client sees them: an HTTP status and OpenAI's shape, without the server's paths or memory addresses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from speculant.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    ModelError,
    RequestError,
    SpeculantError,
)

MAX_MESSAGE = 1000  # characters; a message may quote data of the client
RETRY_AFTER = MappingProxyType({"retry-after": "1"})
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\\S+")
_WORD = re.compile(r"(?<![\w.-])[a-z]\w*(?![\w-])")
_NAME = re.compile(r"\w+[=\[]|[a-z]*_")  # a message begins with a field's name
_NOUNS = frozenset({"prompt", "source", "method", "verification"})  # messages use these field names as nouns
_OF_REQUESTS = RequestError, ConfigError, ModelError  # the client has to change its request
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


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
        """Return the body of the response, or the data of an error event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


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
        return overloaded(_sentence(error, sent_as))
    if isinstance(error, SpeculantError):
        status = 400 if isinstance(error, _OF_REQUESTS) else 500
        return _as_sent(ApiError(status, _sentence(error, sent_as)), sent_as)
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


def _sentence(error: SpeculantError, sent_as: Sent) -> str:
    problem = error.problem if len(error.problem) <= MAX_MESSAGE // 2 else error.problem[: MAX_MESSAGE // 2] + "..."
    first = _WORD.match(problem)
    if not _NAME.match(problem) and not (first and sent_as(first[0])):
        problem = f"{problem[:1].upper()}{problem[1:]}"
    return scrub(f"{problem}. Fix: {error.fix}")
