r"""The models of a server: their engines, which are loaded when they are first asked for, within a bound on memory.

    unloaded --asked for--> loading --> loaded --room is needed, and no request uses it--> unloaded
                               \--> failed --asked for again--> loading

A request holds its model until its response has ended, and a model that is held is never put away. While every loaded
model is held and another one is asked for, the one that was used longest ago takes no new requests, so that it becomes
free. These requests wait for it to be loaded again. So of two busy models none starves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter

from starlette.types import ASGIApp, Receive, Scope, Send

from speculant.engine import AsyncEngine
from speculant.errors import CapacityError, ConfigError, SpeculantError
from speculant.metrics import EngineMetrics
from speculant.scheduling import places_of
from speculant.serving.metrics import ServerMetrics
from speculant.serving.process import return_memory
from speculant.serving.wire import ApiError, overloaded, refusal, sentence
from speculant.types import ANYONE, Client

logger = logging.getLogger(__name__)

Source = AsyncEngine | Callable[[], AsyncEngine]
HOLDS = "speculant.holds"  # in a scope: what is undone when the response has ended
_UNITS = {2**20: "MiB", 2**10: "KiB", 1: "B"}


@dataclass(frozen=True)
class ModelSource:
    """A model of several. names: for requests; clients see the first. load: runs in a thread.

    expected_bytes: returns about how much memory it takes, without loading it; it runs in a thread.
    """

    names: Sequence[str]
    load: Callable[[], AsyncEngine]
    expected_bytes: Callable[[], int]


def check_sizes(sources: Sequence[ModelSource], memory: int, share: float) -> None:
    """Raise ConfigError for the largest model if it alone takes more than all may.

    One whose size can't be read is left out: a request for it gets the reason. share: the part of the memory that each
    model has for keys and values; 0 = they do not depend on the memory.
    """
    sizes = dict[str, int]()
    for each in sources:
        with suppress(SpeculantError):
            sizes[each.names[0]] = each.expected_bytes()
    name, needed = max(sizes.items(), key=itemgetter(1), default=("", 0))
    if needed > memory:
        least = math.ceil((needed - share * memory) / (1 - share))
        problem, fix = _too_large(needed, memory, f" to {_shown(least, math.ceil)}")
        raise ConfigError(f"{name}: {problem}", fix)


def _too_large(needed: int, memory: int, least: str = "") -> tuple[str, str]:
    """Return the problem and the fix of a model that takes more than all may."""
    taken, most = _shown(needed, math.ceil), _shown(memory, math.floor)
    return (
        f"it takes {taken}, and all models may take {most}",
        f"raise --memory{least}, or lower --kv-memory or --max-num-batched-tokens.",
    )


def _shown(size: int, rounded: Callable[[float], int]) -> str:
    """Return a size in the largest unit that it has one of."""
    unit = next((each for each in _UNITS if size >= each), 1)
    return f"{rounded(size / unit)} {_UNITS[unit]}"


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


class ServedModel:
    """A model: its names, its engine while it is loaded, and its requests. For use in one event loop.

    names: for clients, its own first. aliases: further names that requests may use. error: why the last try to load it
    failed. users: requests that hold it. bytes: the memory that it takes; None = unknown until it was loaded once.
    """

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        aliases: Sequence[str],
        prefix: str,
        expected_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """prefix: of the metrics. expected_bytes: see `ModelSource`."""
        self.source = None if isinstance(source, AsyncEngine) else source
        self.names, self._aliases, self.expected_bytes = tuple(names), frozenset(aliases), expected_bytes
        self.loaded: AsyncEngine | None = None
        self.admission = Admission(0)
        self.error: Exception | None = None
        self.users, self.last_use = 0, 0
        self.bytes: int | None = None
        self.waiting: list[asyncio.Future[None]] = []
        self.loading: asyncio.Task[None] | None = None
        self.metrics = ServerMetrics(prefix, self.names[0], self._totals, self._cache, self._longest)
        if isinstance(source, AsyncEngine):
            self.take(source)

    @property
    def engine(self) -> AsyncEngine:
        """The engine, which is loaded."""
        assert self.loaded is not None, "there is no engine"
        return self.loaded

    @property
    def state(self) -> str:
        """One of loaded, loading, failed and unloaded."""
        if self.loaded is not None:
            return "loaded" if self.loaded.is_alive else "failed"
        return "loading" if self.loading else "failed" if self.error else "unloaded"

    def has_name(self, name: str) -> bool:
        """Whether requests may call it so."""
        return name in self.names or name in self._aliases

    def take(self, engine: AsyncEngine) -> None:
        """Become loaded."""
        self.loaded, self.error, self.bytes = engine, None, engine.memory_bytes
        engine.guard_forms()
        limits = engine.limits
        self.admission = Admission(limits.max_num_seqs + limits.max_waiting)

    def _totals(self) -> EngineMetrics | None:
        return None if self.loaded is None else self.loaded.metrics

    def _cache(self) -> dict[str, str] | None:
        if self.loaded is None:
            return None
        config, totals = self.loaded.config, self.loaded.metrics
        tokens = totals.block_size * totals.blocks_total
        return {
            "block_size": str(totals.block_size),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "kv_cache_max_concurrency": str(tokens / self.loaded.limits.max_model_len),
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(totals.blocks_total),
        }

    def _longest(self) -> int:
        assert self.loaded is not None, "there is no engine yet"
        return self.loaded.limits.max_model_len


class LoadedModels:
    """Keeps models in memory while they fit. For use in one event loop. memory: the bytes that all may take."""

    def __init__(self, models: Sequence[ServedModel], memory: int) -> None:
        self._models, self._memory = models, memory
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()  # a model became free, or nobody waits for one any more
        self._leaving: ServedModel | None = None  # it takes no requests, so that it can be put away
        self._uses = itertools.count(1)

    async def hold(self, model: ServedModel) -> None:
        """Wait until a model is loaded, and keep it so until `release`. Raises ApiError if it can't be loaded."""
        model.last_use = next(self._uses)
        if self._is_open(model):
            model.users += 1
            return
        place = asyncio.get_running_loop().create_future()
        model.waiting.append(place)
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(model)  # it was loaded in the same moment
            raise
        finally:
            if place in model.waiting:
                model.waiting.remove(place)
                self._changed.set()

    def keep(self, model: ServedModel) -> None:
        """Hold a model that is held already, for work that goes on after the response."""
        model.users += 1

    def release(self, model: ServedModel) -> None:
        """End what `hold` or `keep` began."""
        model.users -= 1
        if not model.users:
            self._changed.set()

    def refuse_all(self, error: ApiError) -> None:
        """Answer the requests that wait for a model with an error."""
        for model in self._models:
            self._refuse(model, error)
        self._changed.set()

    def _is_open(self, model: ServedModel) -> bool:
        return model.loaded is not None and model.loaded.is_alive and model is not self._leaving

    async def _load(self, model: ServedModel) -> None:
        """Load a model, unless nobody waits for it any more; afterwards those who wait hold it."""
        async with self._one_at_a_time:
            try:
                if not self._is_open(model) and model.waiting:
                    await self._load_alone(model)
            except Exception as error:  # those who asked get it, whatever it is
                model.error = error
                known = isinstance(error, SpeculantError)
                logger.error("%s can't be loaded: %s", model.names[0], error, exc_info=not known)
                # Other errors may name files of the server.
                reason = sentence(error) if isinstance(error, CapacityError) else "The server's log has the reason."
                text = f"The model {model.names[0]!r} could not be loaded. {reason}"
                self._refuse(model, ApiError(503, text, param="model", code="load_failed"))
            finally:
                model.loading = None
            self._admit(model)
            if model.waiting:  # its engine has died at once
                model.loading = asyncio.create_task(self._load(model))

    async def _load_alone(self, model: ServedModel) -> None:
        if model.loaded is not None:  # its engine has died
            await self._put_away(model)
        needed = model.bytes
        if needed is None:
            needed = await asyncio.to_thread(model.expected_bytes)
        assert model.source is not None, "one of several models has a source"
        while model.waiting and await self._make_room(model, needed):
            engine, fits = await asyncio.to_thread(model.source), False
            needed = model.bytes = engine.memory_bytes
            try:
                fits = await self._put_idle_away(model, needed) is None
            finally:
                if fits:
                    model.take(engine)
                else:  # it is larger than expected, and does not stay beside a busy model until that one is free
                    await engine.shutdown(drain=False)
                    del engine
                    await asyncio.to_thread(return_memory)
            if fits:
                return

    async def _make_room(self, model: ServedModel, needed: int) -> bool:
        """Put models away until a model fits; return False if nobody waits for it any more. Raises CapacityError."""
        try:
            while (busy := await self._put_idle_away(model, needed)) is not None:
                if not model.waiting:
                    return False
                self._close(busy)
                self._changed.clear()
                await self._changed.wait()
            return True
        finally:
            self._close(None)

    async def _put_idle_away(self, model: ServedModel, needed: int) -> ServedModel | None:
        """Put models that nobody holds away until a model fits. Return the held one that must go next; None = it fits.

        Raises CapacityError if it would not fit alone.
        """
        if needed > self._memory:
            raise CapacityError(*_too_large(needed, self._memory))
        while True:
            others = [each for each in self._models if each.loaded is not None and each is not model]
            if sum(each.bytes or 0 for each in others) + needed <= self._memory:
                return None
            victim = min(others, key=lambda each: (each.users > 0, each.last_use))
            if victim.users:
                return victim
            await self._put_away(victim)

    def _close(self, model: ServedModel | None) -> None:
        """Let a model, and no other one, take no more requests; None = all take them."""
        before, self._leaving = self._leaving, model
        if before is not None:
            self._admit(before)

    def _admit(self, model: ServedModel) -> None:
        """Let the requests that wait for a model hold it, if it takes requests."""
        for place in model.waiting if self._is_open(model) else ():
            if not place.done():
                model.users += 1
                place.set_result(None)
        if self._is_open(model):
            model.waiting.clear()

    def _refuse(self, model: ServedModel, error: ApiError) -> None:
        for place in model.waiting:
            if not place.done():
                place.set_exception(error)
        model.waiting.clear()

    async def _put_away(self, model: ServedModel) -> None:
        """End a model's engine and return its memory."""
        engine, model.loaded = model.engine, None
        logger.info("%s is put away", model.names[0])
        await engine.shutdown(drain=False)
        del engine
        await asyncio.to_thread(return_memory)


class Holds:
    """Middleware: what a request holds is released when its response has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        with ExitStack() as scope[HOLDS]:
            await self._app(scope, receive, send)
