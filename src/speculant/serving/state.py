"""The state of a server: loading, ready, draining or failed; its models, and threads for texts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

from speculant.engine import AsyncEngine
from speculant.errors import SpeculantError
from speculant.serving.models import Admission, LoadedModels, ServedModel
from speculant.serving.wire import ApiError, api_error, overloaded, unavailable
from speculant.structured import ClientLane, LaneClosedError, LaneFullError

logger = logging.getLogger(__name__)


class ServerState:
    """The models of a server, and whether requests are accepted. For use in one event loop.

    One model is loaded at the start, and without it nothing is served. Several are loaded when they are asked for.

    texts: threads for templates and tokenizers. several: loads the models; None = there is one. created: the start of
    the server, in seconds since the epoch. load_error: the reason why the only model has no engine.
    """

    def __init__(self, models: Sequence[ServedModel], texts: TextLanes, several: LoadedModels | None = None) -> None:
        self.models, self.texts, self._several = tuple(models), texts, several
        self.created = int(time.time())
        self.load_error: Exception | None = None
        self.draining = False

    async def load(self) -> None:
        """Load the only model in a thread, unless it is loaded."""
        only = self.models[0]
        if self._several is not None or only.loaded is not None or only.source is None:
            return
        try:
            only.take(await asyncio.to_thread(only.source))
        except Exception as error:  # /health reports it, whatever it is
            self.load_error = only.error = error
            logger.error("the model can't be loaded: %s", error, exc_info=not isinstance(error, SpeculantError))

    @property
    def has_several(self) -> bool:
        """Whether models are loaded when they are asked for."""
        return self._several is not None

    @property
    def engine(self) -> AsyncEngine:
        """The first model's engine, if it accepts requests; raises ApiError (503) otherwise."""
        self.check()
        return self.models[0].engine

    @property
    def loaded(self) -> AsyncEngine | None:
        """The first model's engine, in whatever state; None while it is not loaded."""
        return self.models[0].loaded

    @property
    def admission(self) -> Admission:
        """The places of the first model's sequences."""
        return self.models[0].admission

    @property
    def loading(self) -> bool:
        """Whether requests are not accepted yet."""
        return self._several is None and self.models[0].loaded is None and self.load_error is None

    @property
    def is_idle(self) -> bool:
        """Whether no text of a request is being read, and no sequence of any model runs or waits."""
        return not (self.texts.is_busy or any(model.admission.count for model in self.models))

    def check(self) -> None:
        """Raise ApiError (503) unless requests are accepted."""
        if self.load_error is not None:
            raise ApiError(503, "The model could not be loaded.", code="engine_failed")
        if self.loading:
            raise unavailable("The model is being loaded. Try again later.", "loading")
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        if self._several is not None:
            return
        try:
            self.models[0].engine.check_health()
        except SpeculantError as error:
            raise api_error(error) from error

    async def hold(self, model: ServedModel, undo: ExitStack) -> None:
        """Wait until a model is loaded, and keep it so until `undo` ends. Raises ApiError."""
        if self._several is not None:
            await self._several.hold(model)
            undo.callback(self._several.release, model)

    def hold_for(self, model: ServedModel, task: asyncio.Task[None]) -> None:
        """Keep a model loaded, which its request holds, until a task has ended that goes on after the response."""
        if (several := self._several) is not None:
            several.keep(model)
            task.add_done_callback(lambda _: several.release(model))

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, give running ones this many seconds to end, then abort them.

        Each aborted stream ends with an error event.
        """
        self.draining = True
        if self._several is not None:
            self._several.refuse_all(unavailable("The server is shutting down.", "shutting_down"))
        if engines := self._engines:
            finished = asyncio.gather(*(engine.shutdown(drain=True) for engine in engines))
            await asyncio.wait({finished}, timeout=seconds)
            if not finished.done():
                logger.warning("aborting the requests that still run after %s s", seconds)
                await asyncio.gather(*(engine.shutdown(drain=False) for engine in engines))
            await finished

    async def close(self) -> None:
        """Abort running requests, and end the threads."""
        self.draining = True
        if self._several is not None:
            self._several.refuse_all(unavailable("The server is shutting down.", "shutting_down"))
        loading = [model.loading for model in self.models if model.loading is not None]
        await asyncio.gather(*loading, return_exceptions=True)  # a thread can't be stopped
        await asyncio.gather(*(engine.shutdown(drain=False) for engine in self._engines))
        self.texts.close()

    @property
    def _engines(self) -> list[AsyncEngine]:
        return [model.loaded for model in self.models if model.loaded is not None]


T = TypeVar("T")
LARGE = 32_768  # bytes of a body that count as large
_MOST_SMALL = 1024  # pieces of small work of one client; as many requests wait in an engine by default
_MOST_AHEAD = 8  # pieces of work of one client for which no request waits
_LONGEST_REST = 0.25  # seconds between pieces of large work


class TextLanes:
    """Threads for work on texts: parsing large bodies, rendering conversations, tokenising.

    Small work has a thread of its own, so it never waits for large work. So has work for which no request waits. Work
    that has begun can't be stopped: its size is bounded instead.
    """

    def __init__(self, most_large: int) -> None:
        """most_large: pieces of large work that one client may have, waiting and begun."""
        self._most_large = most_large
        self._small = ClientLane("speculant-text", most=_MOST_SMALL)
        self._large = ClientLane("speculant-large-text", most=most_large, longest_rest=_LONGEST_REST)
        self._ahead = ClientLane("speculant-text-ahead", most=_MOST_AHEAD, longest_rest=_LONGEST_REST)

    @property
    def is_busy(self) -> bool:
        """Whether work for requests waits or is being done."""
        return self._small.is_busy or self._large.is_busy

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Return the future result of a client's work on a text or body of a size. Cancelled work may never run.

        Raises ApiError if the client has too much work here (429), or after `close` (503).
        """
        if size > LARGE:
            return _submit(self._large, self._most_large, client, work)
        return _submit(self._small, _MOST_SMALL, client, work)

    def submit_ahead(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Return the future result of work for which no request waits, and which delays none here. See `submit`."""
        return _submit(self._ahead, _MOST_AHEAD, client, work)

    def close(self) -> None:
        """Cancel the work that waits, and end the threads."""
        for lane in (self._small, self._large, self._ahead):
            lane.close()


def _submit(lane: ClientLane, most: int, client: str, work: Callable[[], T]) -> Future[T]:
    try:
        return lane.submit(client, work)
    except LaneFullError:
        raise overloaded(
            f"At most {most} requests of one client may wait here for their texts to be read. Try again later."
        ) from None
    except LaneClosedError:
        raise unavailable("The server is shutting down.", "shutting_down") from None
