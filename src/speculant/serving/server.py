"""Runs an application under uvicorn. It drains on SIGTERM, and ends if the model can't be loaded."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from errno import EADDRNOTAVAIL
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from speculant.errors import ConfigError
from speculant.serving.acceptor import Acceptor
from speculant.serving.clients import with_mapped
from speculant.serving.connections import bounded_connections, provisional_connections
from speculant.serving.http1 import HttpConnection, Surroundings
from speculant.serving.middleware import NamedUsers
from speculant.serving.options import ServerOptions
from speculant.serving.round_robin import RoundRobin

_CHECK_TICKS = 5  # between two checks of all connections' deadlines; a tick is a tenth of a second
_ADDRESS = "use an address of this machine as --host, such as 127.0.0.1, or 0.0.0.0 for all of them."
_BACKLOG = 2048  # connections that wait to be accepted
_LAST_EVENTS = 5  # seconds in which the last events of aborted streams are sent


class Lifecycle(Protocol):
    """The state of an application as a server needs it, see `ServerState`."""

    load_error: Exception | None
    draining: bool

    @property
    def loading(self) -> bool:
        """Whether requests can't be answered yet."""

    async def drain(self, seconds: float) -> None:
        """Let running requests end for this long, then abort them."""


class Server(uvicorn.Server):
    """Serves an application until a signal. The first signal lets running requests end, the second one aborts them."""

    def __init__(
        self,
        app: FastAPI,
        options: ServerOptions,
        on_listening: Callable[[str], None],
        on_early_interrupt: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ConfigError if it can't listen at the address, before the application loads anything.

        on_listening: called with the address once requests are answered. on_early_interrupt: called at Ctrl-C during
        loading, which can't be stopped: a draining server would wait for its end. on_ready: called once requests are
        accepted.
        """
        config = uvicorn.Config(
            _behind_proxies(app, options),
            host=options.host,
            port=options.port,
            http=H11Protocol,  # and not a parser that happens to be installed: HttpConnection derives from it
            ws="none",
            loop="asyncio",  # and not uvloop if it happens to be installed: RoundRobin is written for asyncio's loop
            proxy_headers=False,  # see `_behind_proxies`
            timeout_graceful_shutdown=_LAST_EVENTS,
            log_config=None,
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self._state: Lifecycle = app.state.server
        self._options, self._on_listening = options, on_listening
        self._on_early_interrupt, self._on_ready = on_early_interrupt, on_ready
        self._is_ready = False
        self._connections, self._provisional = bounded_connections(options), provisional_connections()
        self._socket = _listen(options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        await super().startup([])
        self._loop = asyncio.get_running_loop()
        if self.started:
            turns = RoundRobin(self._loop)
            shared = Surroundings(self.config, self.server_state, self._options, self._connections, turns)
            acceptor = Acceptor(
                self._socket,
                self._connections,
                self._provisional,
                lambda address: HttpConnection(shared, self.lifespan.state, address),
            )
            self.servers.append(cast(Any, acceptor))
            host, port = self._socket.getsockname()[:2]
            self._on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server.on_tick`."""
        if self._loop is not None and counter % _CHECK_TICKS == 0:
            for places in (self._connections, self._provisional):
                places.check(self._loop.time())
        if not (self._is_ready or self._state.loading or self._state.load_error):
            self._is_ready = True
            self._on_ready()
        return await super().on_tick(counter) or self._state.load_error is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, which /health then reports; exit at the second."""
        if sig == signal.SIGINT and self._state.loading:
            self._on_early_interrupt()
        if self._loop is None or self._state.draining:
            self.should_exit = self.force_exit = True
        else:
            self._state.draining = True
            self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await self._state.drain(self._options.drain_timeout)
        finally:
            self.should_exit = True


def _behind_proxies(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Return an application that learns from trusted proxies who their clients are."""
    if not options.trusted_proxies:
        return app
    named = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), with_mapped(options.trusted_proxies)))
    return named if options.client_header is None else NamedUsers(named, options.client_header, options.trusted_proxies)


def _listen(options: ServerOptions) -> socket.socket:
    """Return a socket that listens at a server's address. If a name has several addresses, an IPv4 one is used."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        with ExitStack() as undone:
            # asyncio sends without delay (TCP_NODELAY) only through sockets that name their protocol.
            made = undone.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(_BACKLOG)
            undone.pop_all()
        return made
    except (OSError, UnicodeError) as error:
        where = f"the server can't listen at {options.host}:{options.port}"
        if isinstance(error, socket.gaierror | UnicodeError):
            raise ConfigError(f"{where}: there is no host of this name", _ADDRESS) from error
        port = "choose another --port, or end the program that uses this one."
        raise ConfigError(f"{where}: {error.strerror}", _ADDRESS if error.errno == EADDRNOTAVAIL else port) from error
