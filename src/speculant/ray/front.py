"""The application in front of replicas: keys, limits and the page are its own, all other requests go to a replica."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from speculant import __version__
from speculant.errors import SpeculantError
from speculant.ray.fleet import Fleet
from speculant.ray.pages import joined
from speculant.ray.routed import RoutedRequest, routed
from speculant.serving.access_log import REQUEST_ID
from speculant.serving.app import add_guards, add_page
from speculant.serving.errors import ApiError, unavailable
from speculant.serving.http.clients import API_KEY, USER
from speculant.serving.options import ServerOptions
from speculant.serving.process import InsideRequest, ResponseHead
from speculant.serving.state import LARGE
from speculant.serving.wire import EventStream, json_response, while_connected

logger = logging.getLogger(__name__)

REPLICA = "x-speculant-replica"  # a response's header: the replica that answered
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_HOP = frozenset({b"connection", b"transfer-encoding", b"x-request-id", b"host", b"origin", b"content-length"})


class Replicas(Protocol):
    """What deploys replicas and ends them. The methods run in a thread."""

    def connect(self) -> None:
        """Connect to the cluster."""

    def start(self) -> Any:
        """Return the handle of the replicas once they answer."""

    def stop(self) -> None:
        """End the replicas."""


class FrontState:
    """Whether requests are accepted, and the replicas. For use in one event loop. waits: see `Fleet`."""

    def __init__(self, replicas: Replicas, waits: float | None = None) -> None:
        self._replicas, self._waits = replicas, waits
        self._fleet: Fleet | None = None
        self.load_error: Exception | None = None
        self.draining = False

    @property
    def loading(self) -> bool:
        """Whether the replicas are still being deployed."""
        return self._fleet is None and self.load_error is None

    @property
    def fleet(self) -> Fleet:
        """The replicas. Raises ApiError (503) unless requests are accepted."""
        if self.load_error is not None:
            raise ApiError(503, "The replicas could not be deployed.", code="engine_failed")
        if self._fleet is None:
            raise unavailable("The replicas are being deployed. Try again later.", "loading")
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        return self._fleet

    async def load(self) -> None:
        """Deploy the replicas."""
        try:
            await asyncio.to_thread(self._replicas.connect)
            _take_signals_back()
            self._fleet = Fleet(await asyncio.to_thread(self._replicas.start), self._waits)
        except Exception as error:  # /health reports it, whatever it is
            self.load_error = error
            logger.error("the replicas can't be deployed: %s", error, exc_info=not isinstance(error, SpeculantError))

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, give running ones this many seconds to end, then abort them."""
        self.draining = True
        if self._fleet is not None:
            await self._fleet.drain(seconds)

    async def close(self) -> None:
        """Abort running requests, and end the replicas."""
        await self.drain(0)
        await asyncio.to_thread(self._replicas.stop)


def _take_signals_back() -> None:
    """Set the handlers of signals again: connecting to Ray replaces them beneath Python."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))


class Front:
    """The handlers."""

    def __init__(self, state: FrontState, options: ServerOptions) -> None:
        self._state, self._options = state, options

    async def health(self) -> Response:
        """Return whether at least one replica answers: 200, or 503 with the reason."""
        if not (found := await self._state.fleet.ask("load")):
            raise unavailable("No replica answers.", "no_replica")
        return json_response({"status": "ok", "replicas": len(found)})

    async def load(self) -> Response:
        """Return the number of sequences that run or wait in all replicas, and in each."""
        found = await self._state.fleet.ask("load")
        return json_response({"server_load": sum(found.values()), "replicas": found})

    async def metrics(self) -> Response:
        """Return the metrics of all replicas in Prometheus' text format."""
        page = joined(await self._state.fleet.ask("page"))
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def forward(self, request: Request) -> Response:
        """Answer with the response of a replica."""
        fleet = self._state.fleet
        pieces = fleet.responses(await _routed(request))
        name, head = await while_connected(request.receive, self._begun(pieces))
        return Forwarded(name, head, pieces, self._options.send_timeout)

    @staticmethod
    async def _begun(pieces: AsyncGenerator[Any, None]) -> tuple[str, ResponseHead]:
        """Return the replica's name and its response's head."""
        name = ""
        async for piece in pieces:
            if isinstance(piece, ResponseHead):
                return name, piece
            name = piece
        raise ConnectionError("a replica ended without a response")


class Forwarded(EventStream):
    """A replica's response."""

    def __init__(
        self, name: str, head: ResponseHead, pieces: AsyncGenerator[Any, None], send_timeout: float | None
    ) -> None:
        super().__init__(pieces, send_timeout)
        self.status_code = head.status
        kept = [(key, value) for key, value in head.headers if key not in _HOP or key == b"content-length"]
        self.raw_headers = [*kept, (REPLICA.encode(), name.encode())]


async def _routed(request: Request) -> RoutedRequest:
    kept = [(key, value) for key, value in request.headers.raw if key not in _HOP]
    headers = (*kept, (b"x-request-id", str(request.scope.get(REQUEST_ID, "")).encode()))
    client = request.client.host if request.client is not None else ""
    body, key = await request.body(), request.scope.get(API_KEY)
    path = request.scope["path"]  # a URL made of it would end at a "#" or "?" that was encoded
    query, user = request.scope["query_string"], request.scope.get(USER)
    inside = InsideRequest(request.method, path, body, headers, query, client, user)
    return routed(inside, key) if len(body) <= LARGE else await asyncio.to_thread(routed, inside, key)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """Deploy the replicas while requests are answered."""
    state: FrontState = app.state.server
    loading = asyncio.create_task(state.load())
    try:
        yield
    finally:
        await loading  # a thread can't be stopped
        await state.close()


def make_front(replicas: Replicas, options: ServerOptions) -> FastAPI:
    """Return an application that answers with replicas. The application's `state.server` is its `FrontState`."""
    state = FrontState(replicas, options.queue_timeout)
    front = Front(state, options)
    app = FastAPI(title="Speculant", version=__version__, openapi_url=None, lifespan=_lifespan, redirect_slashes=False)
    app.state.server = state
    for path, handler in (("/health", front.health), ("/load", front.load), ("/metrics", front.metrics)):
        app.add_api_route(path, handler, methods=["GET"])
    app.add_api_route("/ping", front.health, methods=["GET", "POST"])
    add_page(app)
    app.add_api_route("/{path:path}", front.forward, methods=_METHODS)
    add_guards(app, options)
    return app
