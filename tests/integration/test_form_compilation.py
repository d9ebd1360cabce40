"""An `AsyncEngine` compiles forms beside its event loop, and only for requests that still wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from speculant import AsyncEngine, SamplingParams
from speculant.errors import CapacityError
from speculant.structured import Grammar, GrammarSource
from tests.async_engines import MakeEngine, engine_of as engine_of, run, until


def asking(text: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, structured_outputs={"regex": text})


class Compiler:
    """Notes the forms that an engine compiles and the threads that do so. It waits for `go`, then for `loop` to run."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.begun, self.threads = list[str](), set[str]()
        self._compile = engine._grammars._compile
        monkeypatch.setattr(engine._grammars, "_compile", self.compile)

    def compile(self, source: GrammarSource) -> Grammar:
        self.begun.append(source.text)
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        assert self.go.wait(20)
        if self.loop is not None:
            ran = threading.Event()
            self.loop.call_soon_threadsafe(ran.set)
            assert ran.wait(20), "the loop waits for the form"
        return self._compile(source)


def test_compiling_forms_holds_up_no_loop(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that is forgotten before its request begins would be compiled again, and the loop would wait."""
    engine = engine_of()
    engine._grammars._capacity = 1
    compiler = Compiler(engine, monkeypatch)
    texts = [f"x{number}" for number in range(6)]

    async def test() -> None:
        compiler.loop = asyncio.get_running_loop()
        compiler.go.set()
        async with engine:
            await asyncio.gather(*(engine.generate("a", asking(text)) for text in texts))
        assert sorted(compiler.begun) == texts, "each was compiled once"
        assert compiler.threads == {"speculant-grammars"}

    run(test())


def test_cancelled_requests_compile_nothing(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for forms are bounded, and cancelled ones leave room."""
    engine = engine_of(max_waiting=502)
    compiler = Compiler(engine, monkeypatch)

    async def test() -> None:
        async with engine:
            busy = [asyncio.create_task(engine.generate("a", asking(text))) for text in ("first", "second")]
            await until(lambda: len(compiler.begun) == 2)
            queued = [asyncio.create_task(engine.generate("a", asking(f"x{number}"))) for number in range(500)]
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="max_waiting is 502"):
                await engine.generate("a", asking("one more"))
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
            following = asyncio.create_task(engine.generate("a", asking("next")))
            await asyncio.sleep(0)
            compiler.go.set()
            await asyncio.gather(*busy, following)
        assert compiler.begun[2:] == ["next"]

    run(test())
