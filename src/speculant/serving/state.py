"""The state of a server: loading, ready, draining or failed; its engine, the sequences in it, and threads for texts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from speculant.engine import AsyncEngine
from speculant.errors import SpeculantError
from speculant.scheduling import places_of
from speculant.serving.wire import ApiError, api_error, overloaded, refusal, unavailable
from speculant.structured import ClientLane, LaneClosedError, LaneFullError
from speculant.types import ANYONE, Client

logger = logging.getLogger(__name__)

Source = AsyncEngine | Callable[[], AsyncEngine]


class Admission:
    """Counts the sequences of all requests from arrival to end, and bounds them. For use in one event loop.

    All clients that have sequences share the places by weight, and a client may fill its share, which is at least one
    place. So a client alone may fill every place. A client that comes later may fill its own share all the same. Then
    there are more sequences than places.
    """

    def __init__(self, most: int) -> None:
        """most: places, which is as many sequences as a client alone may have, running and waiting."""
        self.most, self._counts, self._weights = most, Counter[str](), dict[str, float]()

    @property
    def count(self) -> int:
        """The sequences that run or wait."""
        return self._counts.total()

    @contextmanager
    def admit(self, sequences: int, client: Client = ANYONE) -> Iterator[None]:
        """Count sequences of a client while the block runs.

        Raises ApiError if there is no room for them now (429), or never (400).
        """
        if sequences > self.most:
            raise refusal(
                f"The request has {sequences} answers or beams and at most {self.most} may run and wait.", "n"
            )
        name, own = client.name, self._counts[client.name]
        others = sum(weight for other, weight in self._weights.items() if other != name)
        most = places_of(client.weight, others, self.most)
        if own + sequences > most:
            raise overloaded(
                f"The server's queue is full: {own} of this client's sequences run or wait, the request has {sequences}"
                f" and the client's share of {self.most} places is {most}. Try again later."
            )
        self._counts[name], self._weights[name] = own + sequences, client.weight
        try:
            yield
        finally:
            self._counts[name] -= sequences
            if not self._counts[name]:
                del self._counts[name], self._weights[name]


class ServerState:
    """The engine, its sequences, and whether requests are accepted. For use in one event loop.

    source: an engine, or a function that loads one. texts: threads for templates and tokenizers. created: the start of
    the server, in seconds since the epoch. load_error: the reason why there is no engine.
    """

    def __init__(self, source: Source, texts: TextLanes) -> None:
        self._load = source if callable(source) else None
        self._engine: AsyncEngine | None = None
        self.admission = Admission(0)
        self.texts = texts
        self.created = int(time.time())
        self.load_error: Exception | None = None
        self.draining = False
        if isinstance(source, AsyncEngine):
            self._take(source)

    async def load(self) -> None:
        """Load the engine in a thread, unless it is loaded."""
        if self._load is None:
            return
        try:
            self._take(await asyncio.to_thread(self._load))
        except Exception as error:  # /health reports it, whatever it is
            self.load_error = error
            logger.error("the model can't be loaded: %s", error, exc_info=not isinstance(error, SpeculantError))

    @property
    def engine(self) -> AsyncEngine:
        """The engine, if it accepts requests; raises ApiError (503) otherwise."""
        self.check()
        assert self._engine is not None
        return self._engine

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, in whatever state; None until it is loaded."""
        return self._engine

    @property
    def loading(self) -> bool:
        """Whether the engine is still being loaded."""
        return self._engine is None and self.load_error is None

    def check(self) -> None:
        """Raise ApiError (503) unless requests are accepted."""
        if self.load_error is not None:
            raise ApiError(503, "The model could not be loaded.", code="engine_failed")
        if self._engine is None:
            raise unavailable("The model is being loaded. Try again later.", "loading")
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        try:
            self._engine.check_health()
        except SpeculantError as error:
            raise api_error(error) from error

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, give running ones this many seconds to end, then abort them.

        Each aborted stream ends with an error event.
        """
        self.draining = True
        if self._engine is not None:
            finished = asyncio.ensure_future(self._engine.shutdown(drain=True))
            await asyncio.wait({finished}, timeout=seconds)
            if not finished.done():
                logger.warning("aborting the requests that still run after %s s", seconds)
                await self._engine.shutdown(drain=False)
            await finished

    async def close(self) -> None:
        """Abort running requests, and end the threads."""
        self.draining = True
        if self._engine is not None:
            await self._engine.shutdown(drain=False)
        self.texts.close()

    def _take(self, engine: AsyncEngine) -> None:
        self._engine = engine
        engine.guard_forms()
        limits = engine.limits
        self.admission = Admission(limits.max_num_seqs + limits.max_waiting)


T = TypeVar("T")
LARGE = 32_768  # bytes of a body that count as large
_MOST_SMALL = 1024  # pieces of small work of one client; as many requests wait in an engine by default
_LONGEST_REST = 0.25  # seconds between pieces of large work


class TextLanes:
    """Threads for work on texts: parsing large bodies, rendering conversations, tokenising.

    Small work has a thread of its own, so it never waits for large work. Work that has begun can't be stopped: its size
    is bounded instead.
    """

    def __init__(self, most_large: int) -> None:
        """most_large: pieces of large work that one client may have, waiting and begun."""
        self._most_large = most_large
        self._small = ClientLane("speculant-text", most=_MOST_SMALL)
        self._large = ClientLane("speculant-large-text", most=most_large, longest_rest=_LONGEST_REST)

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Return the future result of a client's work on a text or body of a size. Cancelled work may never run.

        Raises ApiError if the client has too much work here (429), or after `close` (503).
        """
        try:
            return (self._large if size > LARGE else self._small).submit(client, work)
        except LaneFullError:
            most = self._most_large if size > LARGE else _MOST_SMALL
            raise overloaded(
                f"At most {most} requests of one client may wait here for their texts to be read. Try again later."
            ) from None
        except LaneClosedError:
            raise unavailable("The server is shutting down.", "shutting_down") from None

    def close(self) -> None:
        """Cancel the work that waits, and end the threads."""
        self._small.close()
        self._large.close()
