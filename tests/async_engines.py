"""Engines in threads of their own over the small checkpoints, which leave nothing after a test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from speculant import AsyncEngine, StreamPiece
from speculant.engine import Engine
from tests.models import EXACT_DTYPE, Checkpoints

MakeEngine = Callable[..., AsyncEngine]
THREAD = "speculant-engine"
_PATIENCE = 20.0  # seconds until a test that waits in vain fails


@pytest.fixture
def engine_of(checkpoints: Checkpoints) -> Iterator[MakeEngine]:
    """Make an engine over the usual target, in a type that keeps texts exact; `draft` names another checkpoint.

    The test has to shut it down. Then no thread is left, and no cache is in use unless the engine was broken.
    """
    made: list[AsyncEngine] = []
    others = engine_threads()  # of fixtures that live longer than a test

    def make(draft: str | None = None, **arguments: Any) -> AsyncEngine:
        if draft is not None:
            arguments |= {"draft_model": getattr(checkpoints, draft), "draft_quantization": "none"}
        made.append(AsyncEngine(**{"model": checkpoints.target, "dtype": EXACT_DTYPE, **arguments}))
        return made[-1]

    yield make
    assert [thread for thread in engine_threads() if thread not in others] == []
    for engine in made:
        assert not engine.is_alive
        if engine._thread._cause is None:
            assert_nothing_is_held(core(engine))


def core(engine: AsyncEngine) -> Engine:
    """Return the engine that the thread owns."""
    return engine._runtime.engine


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def assert_nothing_is_held(engine: Engine) -> None:
    """Assert that nothing runs and that every block of every cache is free."""
    assert not engine.has_unfinished()
    engine.check()
    for cache in (engine._context.cache, *engine._drafters.caches):
        assert cache.free_tokens() == cache.num_blocks * cache.block_size, "blocks are lost"


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, with a limit of time."""

    async def bounded() -> None:
        async with asyncio.timeout(6 * _PATIENCE):
            await test

    asyncio.run(bounded())


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + _PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


async def until_idle(engine: AsyncEngine) -> None:
    """Wait until nothing runs, and assert that nothing is held."""
    await until(lambda: not core(engine).has_unfinished())
    assert_nothing_is_held(core(engine))


async def read_into(pieces: list[StreamPiece], stream: AsyncIterator[StreamPiece]) -> None:
    """Read a stream to its end; what came before an error counts."""
    async for piece in stream:
        pieces.append(piece)  # noqa: PERF401 - they have to be there if it raises
