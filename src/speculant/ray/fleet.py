"""Sends requests to replicas, again to another one if theirs is lost before its response began."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from speculant.ray.routed import RoutedRequest
from speculant.serving.errors import ApiError, timed_out, unavailable
from speculant.serving.openai.service import error_event
from speculant.serving.process import ResponseHead

logger = logging.getLogger(__name__)

TRIES = 3  # replicas that a request is sent to before it fails
ASKING_S = 10.0  # for replicas to answer a question about their state
KEPT_S = 1.0  # for which their answers are kept
_LOST = (RayActorError, ReplicaUnavailableError)
_NAMED = "/v1/responses"  # where the events of streams have names


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
                yield error_event(failure, events, routed.request.path == _NAMED)
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
