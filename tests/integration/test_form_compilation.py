"""Forms of requests to an `AsyncEngine` are compiled beside its event loops, and only while somebody waits for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from speculant import AsyncEngine, SamplingParams
from speculant.errors import CapacityError
from speculant.structured.constraint import Grammar
from speculant.structured.spec import GrammarSource
from tests.async_engines import MakeEngine, run, until
from tests.async_engines import engine_of as engine_of

BEAT = 0.01  # seconds


def asking(text: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, structured_outputs={"regex": text})


class Compiler:
    """Notes what an engine compiles and where. It waits for `go`, then each form takes `delay` seconds more."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, delay: float = 0.0) -> None:
        self.go, self.delay = threading.Event(), delay
        self.begun, self.threads = list[str](), set[str]()
        self._compile = engine._grammars._compile
        monkeypatch.setattr(engine._grammars, "_compile", self.compile)

    def compile(self, source: GrammarSource) -> Grammar:
        self.begun.append(source.text)
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        assert self.go.wait(20)
        time.sleep(self.delay)
        return self._compile(source)


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[float]]:
    """Beat in this loop while the block runs; yields the seconds between beats."""
    gaps: list[float] = []

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    beating = asyncio.create_task(beat())
    yield gaps
    beating.cancel()


def test_more_forms_than_are_kept_hold_up_no_loop(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that is forgotten before its request begins would be compiled again, and the loop would wait."""
    engine = engine_of()
    engine._grammars._capacity = 1
    compiler = Compiler(engine, monkeypatch, delay=0.8)
    texts = [f"x{number}" for number in range(6)]

    async def test() -> None:
        compiler.go.set()
        async with engine, heartbeat() as gaps:
            await asyncio.gather(*(engine.generate("a", asking(text)) for text in texts))
        assert sorted(compiler.begun) == texts, "each was compiled once"
        assert compiler.threads == {"speculant-grammars"}
        assert max(gaps) < 0.8

    run(test())


def test_cancelled_requests_compile_nothing(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    compiler = Compiler(engine, monkeypatch)

    async def test() -> None:
        async with engine:
            busy = [asyncio.create_task(engine.generate("a", asking(text))) for text in ("first", "second")]
            await until(lambda: len(compiler.begun) == 2)
            queued = [asyncio.create_task(engine.generate("a", asking(f"x{number}"))) for number in range(500)]
            await asyncio.sleep(0)
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
            following = asyncio.create_task(engine.generate("a", asking("next")))
            await asyncio.sleep(0)
            compiler.go.set()
            await asyncio.gather(*busy, following)
        assert compiler.begun[2:] == ["next"]

    run(test())


def test_requests_that_wait_for_forms_are_bounded(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(max_waiting=2)
    compiler = Compiler(engine, monkeypatch)

    async def test() -> None:
        async with engine:
            waiting = [asyncio.create_task(engine.generate("a", asking(text))) for text in ("x", "y")]
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="max_waiting is 2"):
                await engine.generate("a", asking("z"))
            compiler.go.set()
            await asyncio.gather(*waiting)
            await engine.generate("a", asking("z"))

    run(test())
