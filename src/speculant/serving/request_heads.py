"""Checks of a request's head (its first line and headers) beyond those of h11. Each raises ApiError (400 or 431)."""

from __future__ import annotations

import re

import h11

from speculant.serving.errors import ApiError, refusal

MOST_HEADERS = 128  # each takes time in the event loop
_END = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(rb"^content-length:(.*)$", re.IGNORECASE | re.MULTILINE)
_ABSOLUTE = re.compile(rb"https?://[^/?]+", re.IGNORECASE)


def find_head(data: bytes) -> bytes | None:
    """Return the head that data begin with, up to its blank line; None = it is not complete."""
    end = _END.search(data)
    return None if end is None else data[: end.end()]


def blank_line(data: bytes) -> int | None:
    """Return the bytes of an empty line before a request, which is ignored (RFC 9112, 2.2). None = more data tell."""
    return None if data == b"\r" else 2 if data.startswith(b"\r\n") else 1 if data.startswith(b"\n") else 0


def headers_too_large(most: int) -> ApiError:
    """Return the error for a head of too many bytes."""
    return ApiError(431, f"The headers have over {most} bytes.", code="headers_too_large")


def check_head(head: bytes, most_bytes: int) -> None:
    """Check a head before it is parsed: its size, the number of its headers, and that it has one length at most."""
    if len(head) > most_bytes:
        raise headers_too_large(most_bytes)
    if head.count(b"\n") - 2 > MOST_HEADERS:
        raise ApiError(431, f"The request has over {MOST_HEADERS} headers.", code="headers_too_large")
    lengths = _LENGTH.findall(head)
    if len(lengths) > 1 or not all(each.strip().isdigit() for each in lengths):
        raise refusal("The request has more than one Content-Length, or one that is not a number.")


def check_request(request: h11.Request) -> h11.Request:
    """Check a parsed head; return it with a target that is a path, as routes expect it."""
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        raise refusal("Only HTTP/1.1 and HTTP/1.0 are supported.")
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise refusal("The length of the body is ambiguous: send either Content-Length or, in HTTP/1.1, chunks.")
    target = _path_of(request)
    if target == request.target:
        return request
    return h11.Request(method=request.method, headers=request.headers, target=target, http_version=request.http_version)


def _path_of(request: h11.Request) -> bytes:
    """Return a target without scheme and host, which clients send to proxies."""
    target = request.target
    if b"#" in target:
        raise refusal("The address has a fragment (#), which clients keep to themselves.")
    if target.startswith(b"/") or (request.method, target) == (b"OPTIONS", b"*"):
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        raise refusal("The address is neither a path nor a URL of http.")
    path = target[absolute.end() :]
    return path if path.startswith(b"/") else b"/" + path


class ChunkCount:
    """Refuses bodies in many tiny chunks, each of which takes as much time as a large one."""

    _FREE, _LEAST_BYTES = 256, 64  # chunks of any size; the least mean size of the others

    def __init__(self) -> None:
        self._chunks = self._bytes = 0

    def add(self, data: h11.Data) -> None:
        """Count a part of the body."""
        self._chunks += data.chunk_start
        self._bytes += len(data.data)
        if self._chunks > self._FREE + self._bytes // self._LEAST_BYTES:
            raise refusal(f"The body has many chunks of less than {self._LEAST_BYTES} bytes: send larger ones.")
