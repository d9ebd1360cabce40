"""The application in front of replicas: keys, limits and the page are its own, all other requests go to a replica.

Requests are sent by the text that Ray's router reads, and again if a replica is lost before its answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import Response

from speculant import __version__
from speculant.errors import SpeculantError
from speculant.serving import (
    API_KEY,
    LARGE,
    REQUEST_ID,
    USER,
    ApiError,
    EventStream,
    InsideRequest,
    ResponseHead,
    ServerOptions,
    add_guards,
    add_page,
    error_event,
    is_billing,
    joined,
    json_response,
    key_digest,
    timed_out,
    unavailable,
    while_connected,
)

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 8192  # of a text; the router keeps texts, and compares them character by character
_TAG = 8  # characters of a client's key or salt
_TEXTS = ("role", "text", "content", "encoder_prompt", "decoder_prompt", "prompt_token_ids", "prompt")
TRIES = 3  # replicas that a request is sent to before it fails
ASKING_S = 10.0  # for replicas to answer a question about their state
KEPT_S = 1.0  # for which their answers are kept
_LOST = (RayActorError, ReplicaUnavailableError)
_NUMBERED = "/v1/responses"  # where the events of streams have numbers


@dataclass(frozen=True)
class RoutedRequest:
    """A request. `prompt`: its text for the router, which is never empty."""

    prompt: str
    request: InsideRequest


def routed(request: InsideRequest, api_key: str | None) -> RoutedRequest:
    """Return a request with its text: the beginning of its prompt, after what separates prefix caches.

    Prompts of different API keys, users or salts share no cache, so their texts differ from the first character.
    """
    try:
        body = json.loads(request.body) if request.body else {}
    except (ValueError, RecursionError):  # the replica refuses it
        body = {}
    body = body if isinstance(body, dict) else {}
    given = body.get("cache_salt")
    parts = (api_key, request.user, given if isinstance(given, str) else None)  # the replica refuses another type
    tag = key_digest(ascii(parts))[:_TAG] if any(parts) else ""
    return RoutedRequest((tag + text_of(body))[:MOST_CHARACTERS] or request.path, request)


def text_of(body: dict[str, Any]) -> str:
    """Return the text of a body's messages, prompt or input: the same for the same prefix of a conversation."""
    if "input_prefix" in body:  # the order of these texts in a prompt for completion at the cursor
        body = {"prompt": [body.get("input_extra"), body["input_prefix"]]}
    for name in ("messages", "prompt", "input"):
        if (value := body.get(name)) is not None:
            parts: list[str] = []
            _collect([body.get("instructions"), body.get("system"), value], parts)
            return "\n".join(parts)
    return ""


def _collect(value: Any, parts: list[str]) -> None:
    """Append the texts within a prompt, in their order. Token ids become text."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | int):
            parts += [] if is_billing(item) else [str(item)]
        elif isinstance(item, list):
            waiting.extend(reversed(item))
        elif isinstance(item, dict):
            waiting.extend(reversed([item[name] for name in _TEXTS if name in item]))


class Handle(Protocol):
    """What is needed of Ray's `DeploymentHandle`."""

    def options(self, *, stream: bool) -> Any:
        """Return a handle whose calls are streams."""

    def broadcast(self, method_name: str) -> Any:
        """Call a method of all replicas."""


class Fleet:
    """The replicas of a deployment, which a handle calls. Use it in one event loop.

    waits: seconds that a request waits for a replica to take it; None = for ever.
    """

    def __init__(self, handle: Handle, waits: float | None = None) -> None:
        self._handle, self._calls, self._waits = handle, handle.options(stream=True), waits
        self._told: dict[str, tuple[float, dict[str, Any]]] = {}  # by method: when replicas told, and what
        self._asking = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._running: set[Any] = set()
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def responses(self, routed: RoutedRequest) -> AsyncGenerator[str | ResponseHead | bytes, None]:
        """Yield the replica's name, then the response's head and its pieces. The last name is the one that answers.

        A replica that is lost before the head is replaced by another one; afterwards a stream ends with an error event,
        and another response breaks off with ConnectionError. Closing the iterator aborts the request. Raises ApiError
        if no replica takes the request in time (504), or if none could answer it.
        """
        for number in range(1, TRIES + 1):
            head: ResponseHead | None = None
            events = 0
            call = self._begin(routed)
            try:
                yield await self._taken(call)
                async for piece in call:
                    head = piece if isinstance(piece, ResponseHead) else head
                    events += piece.count(b"\n\n") if isinstance(piece, bytes) else 0
                    yield piece
                return
            except (RayError, BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError) as error:
                failure = self._failure(error)
                if head is None and isinstance(error, _LOST) and number < TRIES and not self._closed:
                    logger.warning("a replica was lost before its response began: the request goes to another one")
                    continue
                if head is None:
                    raise failure from error
                if not _is_stream(head):
                    raise ConnectionError(failure.message) from error
                request = routed.request
                scope = {"path": request.path, "headers": request.headers}
                yield error_event(failure, scope, events if request.path == _NUMBERED else None)
                return
            finally:
                self._end(call)

    async def ask(self, method: str) -> dict[str, Any]:
        """Call a method of every replica; return the results by replica name. Replicas that do not answer are left out.

        They are asked once in `KEPT_S`, however many callers ask.
        """
        async with self._asking[method]:
            now = asyncio.get_running_loop().time()
            at, told = self._told.get(method, (-math.inf, {}))
            if now - at >= KEPT_S:
                told = await self._ask(method)
                self._told[method] = asyncio.get_running_loop().time(), told
            return told

    async def _ask(self, method: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(ASKING_S):
                # `results_async` has one deadline for all: a silent replica would silence the others
                sent = await self._handle.broadcast(method)._fetch_replica_results_async()
        except (RayError, TimeoutError, DeploymentUnavailableError) as error:
            logger.warning("the replicas were not asked: %r", error)
            return found
        answers = [asyncio.ensure_future(each.get_async()) for each in sent]
        done, late = await asyncio.wait(answers, timeout=ASKING_S) if answers else (set(), set())
        for answer in late:
            answer.cancel()
        for answer in done:
            if answer.exception() is None:
                name, value = answer.result()
                found[name] = value
        if len(found) < len(answers):
            logger.warning("%d of %d replicas did not answer", len(answers) - len(found), len(answers))
        return dict(sorted(found.items()))

    async def drain(self, seconds: float) -> None:
        """Wait for this long for running requests to end, then abort them."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("aborting the requests that still run after %s s", seconds)
        self._closed = True
        for call in list(self._running):
            call.cancel()

    async def _taken(self, call: Any) -> str:
        """Wait until a replica takes a request, and return its name."""
        try:
            async with asyncio.timeout(self._waits):
                name: str = await anext(call, "")
                return name
        except TimeoutError:
            raise timed_out(f"No replica took the request in {self._waits} s.") from None

    def _begin(self, routed: RoutedRequest) -> Any:
        call = self._calls.answer.remote(routed)
        self._running.add(call)
        self._idle.clear()
        return call

    def _end(self, call: Any) -> None:
        """Forget a call, and abort it unless it has ended: its replica then aborts the request."""
        call.cancel()
        self._running.discard(call)
        if not self._running:
            self._idle.set()

    def _failure(self, error: Exception) -> ApiError:
        """Return the error of a request that no replica answered."""
        if isinstance(error, BackPressureError):
            return unavailable("Too many requests wait for a replica. Try again later.", "overloaded")
        if self._closed and isinstance(error, TaskCancelledError):
            return unavailable("The server is shutting down.", "shutting_down")
        if isinstance(error, _LOST):
            return unavailable("The replica that answered was lost. Send the request again.", "replica_lost")
        logger.error("a request failed in the cluster: %r", error)
        return ApiError(500, "The request failed in the cluster.", code="cluster_error")


def _is_stream(head: ResponseHead) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers)


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
