"""Runs an application under uvicorn: it drains on SIGTERM, and ends if the model can't be loaded."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from speculant.serving.options import ServerOptions
from speculant.serving.state import ServerState
from speculant.serving.streams import ABORT

_KEEP_ALIVE = 15  # seconds that a connection may idle
_LAST_EVENTS = 5  # seconds in which the last events of aborted streams are sent


class AbortableProtocol(H11Protocol):
    """HTTP/1.1 whose requests can close their connection at once, although a slow reader has not read what was sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("extensions", {})[ABORT] = self.transport.abort
            await inner(scope, receive, send)

        self.app = cast(Any, app)


class Server(uvicorn.Server):
    """Serves an application until a signal. The first one lets running requests end, the second one does not."""

    def __init__(
        self,
        app: FastAPI,
        options: ServerOptions,
        on_listening: Callable[[str], None],
        on_early_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """on_listening: gets the address once requests are answered.

        on_early_interrupt: called at Ctrl-C during a load. A load can't be
            stopped, so a server that drained would wait for its end.
        """
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            http=AbortableProtocol,
            ws="none",
            h11_max_incomplete_event_size=8 * options.max_header_bytes,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_EVENTS,
            log_config=None,
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self._state: ServerState = app.state.server
        self._options, self._on_listening = options, on_listening
        self._on_early_interrupt = on_early_interrupt
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server.on_tick`."""
        return await super().on_tick(counter) or self._state.load_error is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, while /health says so; exit at the second."""
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
