"""Which web pages may use a server without keys. A browser sends what any page asks for, but names the page's site."""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from speculant.serving.errors import ApiError
from speculant.serving.middleware import refuse
from speculant.serving.options import ServerOptions

ANY = "*"
_PORTS = {"http": 80, "https": 443}


class Sites:
    """Refuses requests that pages of other sites make (403). Open paths are answered to all.

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
