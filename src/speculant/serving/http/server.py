"""Serves an application. It drains on SIGTERM, and ends if the model can't be loaded."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from email.utils import formatdate
from errno import EADDRNOTAVAIL
from types import FrameType
from typing import Any, ClassVar, Protocol, cast

from fastapi import FastAPI
from starlette.types import ASGIApp

from speculant.errors import ConfigError
from speculant.serving.http.clients import (
    PROVISIONAL,
    Connections,
    Rarely,
    RoundRobin,
    bounded_connections,
    with_mapped,
)
from speculant.serving.http.connection import Address, HttpConnection, Surroundings
from speculant.serving.http.limits import NamedUsers
from speculant.serving.options import ServerOptions
from speculant.serving.wire import raw_error

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CHECK_TICKS, _DATE_TICKS = 5, 10  # between two checks of all connections' deadlines, and two readings of the date
_ADDRESS = "use an address of this machine as --host, such as 127.0.0.1, or 0.0.0.0 for all of them."
_BACKLOG = 2048  # connections that wait to be accepted
LAST_EVENTS = 5  # seconds in which the last events of aborted streams are sent


class Lifecycle(Protocol):
    """The state of an application as a server needs it, see `ServerState`."""

    load_error: Exception | None
    draining: bool

    @property
    def loading(self) -> bool:
        """Whether requests can't be answered yet."""

    async def drain(self, seconds: float) -> None:
        """Let running requests end for this long, then abort them."""


class Server:
    """Serves an application until a signal. The first signal lets running requests end, the second one aborts them."""

    tick_s: ClassVar[float] = 0.1  # seconds between two looks at deadlines and ends

    def __init__(
        self,
        app: FastAPI,
        options: ServerOptions,
        on_listening: Callable[[str], None],
        on_early_interrupt: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ConfigError for a certificate that can't be used, and if it can't listen at the address.

        Both are found before the application loads anything.

        on_listening: called with the address once requests are answered. on_early_interrupt: called at Ctrl-C during
        loading, which can't be stopped: a draining server would wait for its end. on_ready: called once requests are
        accepted.
        """
        self._app, self._options = app, options
        self._state: Lifecycle = app.state.server
        self._on_listening, self._on_early_interrupt, self._on_ready = on_listening, on_early_interrupt, on_ready
        self._is_ready = self._must_end = False
        self._places, self._provisional = bounded_connections(options), Connections(PROVISIONAL, 0)
        self._tls = tls_context(options)
        self._socket = _listen(options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.should_exit = False

    def run(self) -> None:
        """Serve in an event loop of its own."""
        asyncio.run(self.serve())

    async def serve(self) -> None:
        """Serve until a signal, an error of loading, or until `should_exit` is set."""
        self._loop = asyncio.get_running_loop()
        self.server_state = Surroundings(
            _behind_proxies(self._app, self._options), self._options, self._places, RoundRobin(self._loop), self._tls
        )
        with self._signals():
            async with self._app.router.lifespan_context(self._app):
                acceptor = Acceptor(
                    self._socket,
                    self._places,
                    self._provisional,
                    lambda address: HttpConnection(self.server_state, address),
                )
                host, port = self._socket.getsockname()[:2]
                scheme, shown = "https" if self._tls else "http", f"[{host}]" if ":" in host else host
                self._on_listening(f"{scheme}://{shown}:{port}{self._options.root_path}")
                await self._until_exit()
                acceptor.close()
                await self._end_connections()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals, of which a program tells its main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _until_exit(self) -> None:
        ticks = 0
        while not (self.should_exit or self._state.load_error):
            self._tick(ticks)
            ticks += 1
            await asyncio.sleep(self.tick_s)

    def _tick(self, count: int) -> None:
        assert self._loop is not None
        if count % _DATE_TICKS == 0:
            self.server_state.date = formatdate(usegmt=True).encode()
        if count % _CHECK_TICKS == 0:
            for places in (self._places, self._provisional):
                places.check(self._loop.time())
        if not (self._is_ready or self._state.loading or self._state.load_error):
            self._is_ready = True
            self._on_ready()

    async def _end_connections(self) -> None:
        """Let answers end for a few seconds, then cancel them."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        tasks = self.server_state.tasks
        try:
            async with asyncio.timeout(LAST_EVENTS):
                while (self.server_state.connections or tasks) and not self._must_end:
                    await asyncio.sleep(self.tick_s)
        except TimeoutError:
            logger.error("cancelling %s requests that did not end", len(tasks))
            for task in tasks:
                task.cancel()

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """Drain at the first signal, which /health then reports; exit at the second."""
        if number == signal.SIGINT and self._state.loading:
            self._on_early_interrupt()
        if self._loop is None or self._state.draining:
            self.should_exit = self._must_end = True
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
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    named = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), with_mapped(options.trusted_proxies)))
    return named if options.client_header is None else NamedUsers(named, options.client_header, options.trusted_proxies)


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the settings of HTTPS; None = HTTP. Raises ConfigError for files that can't be used."""
    if options.ssl_certfile is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        made.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: options.ssl_keyfile_password or "")
        if options.ssl_ca_certs is not None:
            made.load_verify_locations(options.ssl_ca_certs)
        if options.ssl_ciphers is not None:
            made.set_ciphers(options.ssl_ciphers)
        made.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"HTTPS can't use {options.ssl_certfile}, {options.ssl_keyfile or 'its own key'}: {error}",
            "give a certificate and its key in PEM as --ssl-certfile and --ssl-keyfile.",
        ) from error
    return made


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


_AT_ONCE = 8  # connections that are accepted before other work of the loop
_PAUSE = 0.01  # seconds until the next try after an error
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts the connections of a listening socket.

    Reason: while the process has too many open files, asyncio's own server logs hundreds of tracebacks a second.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        provisional: Connections,
        connect: Callable[[Address], HttpConnection],
    ) -> None:
        """provisional: the connections beyond the places. connect: returns the protocol of one from an address."""
        self._socket, self._connections, self._provisional = listening, connections, provisional
        self._connect = connect
        self._loop, self._rarely = asyncio.get_running_loop(), Rarely()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _resume(self) -> None:
        self._loop.add_reader(self._socket, self._accept_some)

    def _accept_some(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait_after(error)
                return
            self._take(accepted, address[:2])

    def _wait_after(self, error: OSError) -> None:
        """Drop waiting connections if there is no room, and try again later: the socket stays readable.

        Other errors are those of one connection or of the network, which open connections have no part in.
        """
        self._rarely.warn("can't accept connections, %s are open: %s", len(self._connections), error.strerror)
        for _ in range(_AT_ONCE if error.errno in _LACKS else 0):
            self._connections.make_room()
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(_PAUSE, self._resume)

    def _take(self, accepted: socket.socket, address: Address) -> None:
        connection, host = self._connect(address), address[0]
        for places in (self._connections, self._provisional):
            if places.add(connection, host):
                connection.begin(accepted, places)
                return
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            accepted.send(raw_error(self._connections.refusal(host)))
