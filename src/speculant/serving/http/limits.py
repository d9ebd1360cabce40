"""Middleware for all requests: bounds on headers and body, the API key, and the sites of web pages."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculant.serving.http.clients import API_KEY, USER, client_of, is_within, key_digest
from speculant.serving.options import ServerOptions
from speculant.serving.wire import ApiError, error_response, unavailable

_SEPARATORS = len(": \r\n")  # of a header
_LINGER = 1.0  # seconds of discarding the rest of a refused body, so that the client reads the response


class NamedUsers:
    """Notes the user whom a trusted front end names in a header. From other senders the header has no effect.

    It comes before anything that replaces the address of the sender. networks: those of trusted front ends.
    """

    def __init__(self, app: ASGIApp, header: str, networks: Sequence[str]) -> None:
        self._app, self._header, self._networks = app, header, networks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        if scope["type"] == "http" and is_within((scope.get("client") or ("",))[0], self._networks):
            names = Headers(scope=scope).getlist(self._header)
            if len(names) == 1 and names[0].strip():
                scope[USER] = key_digest(names[0].strip())
        await self._app(scope, receive, send)


class Heads:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send_head)
        finally:
            if API_KEY in inner:
                scope[API_KEY] = inner[API_KEY]  # for the record of the request


class RequestLimits:
    """Refuses headers and bodies that are too large, bodies that arrive too slowly, and compressed bodies.

    It does so before a body is read to its end. The route gets a body in one piece.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self._bodies = BodyBytes(options.max_buffered_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._bodies.holding(client_of(scope)) as hold:
            try:
                self._check_headers(scope)
                body = await self._read(scope, receive, hold)
            except ApiError as error:
                refused = error
            else:
                if body is not None:
                    await self._app(scope, _after(body, receive), send)
                return
        await refuse(refused, scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        most = self._options.max_header_bytes
        size = sum(len(name) + len(value) + _SEPARATORS for name, value in scope["headers"])
        size += len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > most:
            raise ApiError(431, f"The headers have over {most} bytes.", code="headers_too_large")
        coding = Headers(scope=scope).get("content-encoding", "identity")
        if coding.strip().lower() not in ("identity", ""):
            text = f"The body is compressed ({coding[:40]}): send plain JSON, without Content-Encoding."
            raise ApiError(415, text, code="unsupported_encoding")

    async def _read(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> bytes | None:
        """Return the body; None if the client disconnected before its end."""
        most = self._options.max_body_bytes
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    hold(len(part))
                    body += part
                    if len(body) > most:
                        raise _too_large(most)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, "The body did not arrive in time.", code="timeout") from None


class BodyBytes:
    """Bounds the bytes of all bodies that are held at a time. For use in one event loop.

    A client may hold as many as stay free for others. If n clients each take as many as they can get, each holds
    1 / (n + 1) of the bytes, and as many are left for a new client.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._held: Counter[str] = Counter()

    @contextmanager
    def holding(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes until the end of the block; it raises ApiError (503) for too many."""
        own = 0

        def hold(count: int) -> None:
            nonlocal own
            if self._held[client] + count > self._free - count:
                raise unavailable(
                    "The bodies of your requests take up the memory that is left for them. Try again later.",
                    "bodies_too_large",
                )
            own += count
            self._free -= count
            self._held[client] += count

        try:
            yield hold
        finally:
            self._free += own
            self._held[client] -= own
            if not self._held[client]:
                del self._held[client]


class ApiKeys:
    """Refuses requests without one of the keys, which it compares in constant time. Open paths need no key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = ()) -> None:
        self._app, self._keys, self._open_paths = app, tuple(keys), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        if scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths:
            given = next(filter(self._has, _sent_keys(Headers(scope=scope))), None)
            if given is None:
                error = ApiError(
                    401,
                    "The API key is missing or wrong: send it in one header, Authorization: Bearer KEY or X-Api-Key.",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await refuse(error, scope, receive, send)
                return
            scope[API_KEY] = given
        await self._app(scope, receive, send)

    def _has(self, given: str) -> bool:
        """Compare with every key, so that the time does not depend on which one matches."""
        data = given.encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(data, key.encode("ascii")) for key in self._keys]
        return any(matches)


def _sent_keys(headers: Headers) -> Iterator[str]:
    """Yield the keys of a request: at most one as a bearer, as OpenAI's clients send it, and one as Anthropic's do."""
    bearers, plain = headers.getlist("authorization"), headers.getlist("x-api-key")
    scheme, _, given = (bearers[0] if len(bearers) == 1 else "").partition(" ")
    if scheme.lower() == "bearer":
        yield given.strip()
    if len(plain) == 1:
        yield plain[0].strip()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body has over {most} bytes.", code="body_too_large")


def _after(body: bytes, receive: Receive) -> Receive:
    """Return a channel that yields the body first, then the following messages."""
    waiting = [body]

    async def receive_body() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_body


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before the body was read, discard what arrives within a second, and close the connection."""
    response = error_response(error, scope)
    headers = MutableHeaders(raw=list(response.raw_headers))
    headers["connection"] = "close"
    await send({"type": "http.response.start", "status": error.status, "headers": headers.raw})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    if "expect" not in Headers(scope=scope):
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                await _discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


ANY = "*"
_PORTS = {"http": 80, "https": 443}


class Sites:
    """Refuses requests that pages of other sites make (403), on a server without keys. Open paths are answered to all.

    A browser sends what any page asks for, but names the page's site.
    `Origin` names the site of a page that sends data. A site whose name leads to this server's address (DNS rebinding)
    counts as the server itself for a browser, so `Host` has to be a name of the server. A site has neither an address
    as its name nor, outside of the server's own network, a name without a dot.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, open_paths: Collection[str] = ()) -> None:
        self._app, self._open_paths, self._origins = app, open_paths, options.allowed_origins
        self._names = {name.lower() for name in ("localhost", socket.gethostname(), options.host)}
        self._names |= {name.lower() for name in options.allowed_hosts}
        self._is_local = _is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        error = None
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            error = self._error(Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(error, scope, receive, send)

    def _error(self, headers: Headers) -> ApiError | None:
        for host in headers.getlist("host"):  # only HTTP/1.0 has none, which browsers do not speak
            if not self._is_own(name := _place(f"http://{host}")[0]):
                return _forbidden(f"{name[:80]!r} is not a name of this server", f"--allowed-host {name[:80]}")
        for origin in headers.getlist("origin"):
            own = _place(f"{origin.partition(':')[0]}://{headers.get('host', '')}")
            if not ({ANY, origin} & {*self._origins} or (_place(origin) == own and own[0])):
                return _forbidden(
                    f"pages of {origin[:80]!r} may not use this server", f"--allowed-origin {origin[:80]}"
                )
        return None

    def _is_own(self, name: str) -> bool:
        if ANY in self._names or name in self._names or _is_address(name):
            return True
        return bool(name) and "." not in name and not self._is_local


def _place(url: str) -> tuple[str, int | None]:
    """Return the host and the port of a URL; an empty name for one that is not valid."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").removesuffix("."), parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ip_address(name).is_loopback)


def _forbidden(problem: str, flag: str) -> ApiError:
    fix = f"start it with {flag}, or with --api-key and send the key"
    return ApiError(403, f"On a server without keys, {problem}: {fix}.", code="forbidden_site")
