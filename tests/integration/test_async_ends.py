"""Requests and engines that are cancelled, dropped, shut down or broken leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from speculant import AsyncEngine, RequestOutput, SamplingParams, StreamPiece
from speculant.engine import Generation, async_engine as thread_module
from speculant.errors import EngineClosedError, EngineDeadError
from tests.async_engines import (
    MakeEngine,
    assert_nothing_is_held,
    core,
    engine_of,
    engine_threads,
    read_into,
    run,
    until,
    until_idle,
)
from tests.integration.conftest import MakeLLM
from tests.models import Checkpoints

__all__ = ["engine_of"]

TEXTS = ["def read(path):", "class A:", "import os", "hello world " * 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


# --- cancelled


class Watch:
    """Notes the requests of each step of an engine, and the objects of ended requests that are still alive."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.late: list[str] = []  # requests that a step still had, two or more after they were cancelled
        self._gone: dict[str, int] = {}
        self._engine, self._step, self._start = core(engine), core(engine).step, Generation.start
        self._add = thread_module.EngineThread.add
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        monkeypatch.setattr(self._engine, "step", self.step)
        monkeypatch.setattr(Generation, "start", lambda *arguments: self.start(*arguments))
        monkeypatch.setattr(thread_module.EngineThread, "add", lambda thread, stream: self.add(thread, stream))

    def cancelled(self, request_id: str) -> None:
        self._gone[request_id] = self.steps

    def step(self) -> Any:
        self.steps += 1
        for request_id in self._engine._by_id:
            if self.steps > self._gone.get(request_id, self.steps) + 1:
                self.late.append(request_id)
        return self._step()

    def add(self, thread: thread_module.EngineThread, stream: thread_module.PieceStream) -> None:
        self.alive.add(stream)
        self._add(thread, stream)

    def start(self, generation: Generation, *arguments: Any) -> None:
        self._start(generation, *arguments)
        self.alive.update([generation, *generation._requests])


async def cancel_one(engine: AsyncEngine, stop_checker: Watch, chance: random.Random, request_id: str) -> None:
    """Start a request of any kind, and cancel it at some moment between its first and its last."""
    params = SamplingParams(n=chance.choice([1, 1, 3]), seed=chance.getrandbits(32), max_tokens=chance.choice([1, 90]))
    prompt = [chance.randrange(250) for _ in range(chance.choice([1, 20, 120]))]
    if chance.random() < 0.5:
        task = asyncio.create_task(engine.generate(prompt, params, request_id=request_id))
        await asyncio.sleep(chance.choice([0, 0, 0.005, 0.03]) * chance.random())
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.result().finished
    else:
        async with aclosing(engine.stream(prompt, params, request_id=request_id)) as pieces:
            left = chance.randrange(4)
            while left and await anext(pieces, None) is not None:
                left -= 1
    stop_checker.cancelled(request_id)


async def cancel_many(engine: AsyncEngine, stop_checker: Watch, count: int, width: int, chance: random.Random) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await cancel_one(engine, stop_checker, chance, f"cancelled-{number}")

    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(some())


@pytest.mark.parametrize(
    ("backend", "count"), [("paged", 100), ("slotted", 60), pytest.param("paged", 1000, marks=pytest.mark.slow)]
)
def test_many_cancelled_requests_leave_nothing(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, backend: str, count: int
) -> None:
    """Each is gone within two steps, with all its blocks; requests beside them write the same as alone."""

    async def main() -> None:
        small = {"dtype": "float32", "max_num_seqs": 6, "kv_cache_backend": backend}
        async with engine_of("near", spec_length=2, **small) as engine:
            (expected,) = (await engine.generate(TEXTS[0], LONG)).outputs
            stop_checker = Watch(engine, monkeypatch)
            cancelling = asyncio.create_task(cancel_many(engine, stop_checker, count, 8, random.Random(backend)))
            while not cancelling.done():
                (beside,) = (await engine.generate(TEXTS[0], LONG)).outputs
                assert beside.text == expected.text
            await cancelling
            await until_idle(engine)
            assert stop_checker.late == []
            assert engine.metrics.aborted > 0.6 * count
            del cancelling
            await asyncio.sleep(0.1)  # the last good-byes
            gc.collect()
            assert not stop_checker.alive

    run(main())


@pytest.mark.parametrize("prompt", [TEXTS[0], [9] * 200], ids=["short", "long"])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_cancelled_task_ends_as_cancelled(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, prompt: Any, steps: int
) -> None:
    async def main() -> None:
        async with engine_of("near") as engine:
            step, taken, go_on = core(engine).step, list[int](), threading.Event()

            def held() -> Any:
                """Take the next step; after the first ones, once the task is cancelled."""
                assert len(taken) < steps or go_on.wait(20)
                taken.append(1)
                return step()

            monkeypatch.setattr(core(engine), "step", held)
            task = asyncio.create_task(engine.generate(prompt, LONG))
            await until(lambda: len(taken) == steps)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0)
            assert task.cancelled()
            go_on.set()
            await until_idle(engine)

    run(main())


def test_a_task_group_cancels_its_requests(engine_of: MakeEngine) -> None:
    async def main() -> None:
        async with engine_of("near") as engine:
            tasks: list[asyncio.Task[RequestOutput]] = []

            async def fail() -> None:
                await until(lambda: engine.metrics.running == 3)
                raise LookupError

            async def together() -> None:
                async with asyncio.TaskGroup() as group:
                    tasks.extend(group.create_task(engine.generate(text, LONG)) for text in TEXTS[:3])
                    group.create_task(fail())

            with pytest.raises(ExceptionGroup) as caught:
                await together()
            assert [type(error) for error in caught.value.exceptions] == [LookupError]
            assert all(task.cancelled() for task in tasks)
            await until_idle(engine)

    run(main())


@pytest.mark.parametrize("read", [0, 1, 9])
def test_a_dropped_iterator_aborts_its_request(engine_of: MakeEngine, read: int) -> None:
    async def main() -> None:
        async with engine_of("near") as engine:
            pieces = engine.stream(TEXTS[0], LONG)
            for _ in range(read):
                await anext(pieces)
            del pieces
            await until_idle(engine)
            assert (engine.metrics.finished, engine.metrics.aborted) == (0, min(read, 1))

            async for _ in engine.stream(TEXTS[0], LONG):
                break
            await until_idle(engine)

    run(main())


def test_a_closed_loop_does_not_harm_the_engine(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    (expected,) = llm_of("near").generate(TEXTS[1], GREEDY)
    engine = engine_of("near")
    loop = asyncio.new_event_loop()
    pieces: AsyncGenerator[StreamPiece, None] = engine.stream(TEXTS[0], LONG)
    loop.run_until_complete(anext(pieces))
    loop.close()

    async def main() -> None:
        async with engine:
            assert (await engine.generate(TEXTS[1], GREEDY)).outputs == expected.outputs
            await until_idle(engine)
            assert engine.metrics.aborted == 1

    run(main())


def test_a_stream_s_end_does_not_abort_another_one_of_its_id(engine_of: MakeEngine) -> None:
    async def main() -> None:
        async with engine_of("near") as engine:
            first = engine.stream(TEXTS[0], SamplingParams(max_tokens=2), request_id="x")
            await anext(first)
            await until(lambda: not engine._thread._open)  # the reader has not come to the end yet
            second = engine.stream(TEXTS[1], GREEDY, request_id="x")
            pieces = [await anext(second)]
            await first.aclose()
            pieces += [piece async for piece in second]
            assert pieces[-1].finish_reason == "length"

    run(main())


# --- shut down


def start(engine: AsyncEngine, params: SamplingParams = GREEDY) -> list[asyncio.Task[RequestOutput]]:
    return [asyncio.create_task(engine.generate(text, params)) for text in TEXTS]


def test_draining_finishes_all_requests(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    expected = [output.outputs for output in llm_of("near").generate(TEXTS, GREEDY)]

    async def main() -> None:
        engine = engine_of("near", max_num_seqs=2)
        tasks = start(engine)
        await asyncio.sleep(0)
        closing = [asyncio.create_task(engine.shutdown(drain=True)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="was shut down"):
            await engine.generate(TEXTS[0], GREEDY)
        with pytest.raises(EngineClosedError):
            engine.check_health()
        assert engine.is_alive
        await asyncio.gather(*closing)
        assert [(await task).outputs for task in tasks] == expected

    run(main())


@pytest.mark.parametrize("drains", [False, True])
def test_aborting_ends_everything_at_once(engine_of: MakeEngine, drains: bool) -> None:
    """Requests that are being drained, too."""

    async def main() -> None:
        others = engine_threads()
        engine = engine_of("near", max_num_seqs=2)
        pieces = engine.stream(TEXTS[0], LONG)
        had = [await anext(pieces)]
        tasks = start(engine, LONG)
        await asyncio.sleep(0.01)
        if drains:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.shutdown(drain=True), 0.01)
            assert engine.is_alive
        await engine.shutdown(drain=False)
        assert engine_threads() == others
        for task in tasks:
            with pytest.raises(EngineClosedError, match="before this request ended"):
                await task
        with pytest.raises(EngineClosedError):
            await read_into(had, pieces)
        assert 0 < len(had) < 200
        assert engine.metrics.aborted == 5

    run(main())


def test_shutting_down_again_changes_nothing(engine_of: MakeEngine) -> None:
    async def main() -> None:
        engine = engine_of()
        for drain in (True, True, False, True):
            await engine.shutdown(drain)
        with pytest.raises(EngineClosedError):
            await anext(engine.stream(TEXTS[0]))

    run(main())
    run(main())


def test_the_block_s_end_drains_and_an_exception_aborts(engine_of: MakeEngine) -> None:
    tasks: list[asyncio.Task[RequestOutput]] = []

    async def leave(engine: AsyncEngine, error: BaseException | None) -> None:
        async with engine:
            tasks[:] = start(engine, LONG)
            await until(lambda: core(engine).has_unfinished())
            if error is not None:
                raise error

    async def main() -> None:
        await leave(engine_of("near"), None)
        assert all(output.finished for output in await asyncio.gather(*tasks))
        engine = engine_of("near")
        with pytest.raises(LookupError):
            await leave(engine, LookupError())
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineClosedError] * len(TEXTS)
        assert engine.metrics.aborted == len(TEXTS)

    run(main())


@pytest.mark.slow
def test_an_unreferenced_engine_ends_its_thread(engine_of: MakeEngine, checkpoints: Checkpoints) -> None:
    others = engine_threads()
    engine = AsyncEngine(checkpoints.target)
    asyncio.run(engine.generate(TEXTS[0], GREEDY))
    inner = weakref.ref(core(engine))
    (thread,) = [thread for thread in engine_threads() if thread not in others]
    del engine
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    assert inner() is None


EXIT = """
import asyncio
from speculant import AsyncEngine, SamplingParams

engine = AsyncEngine("demo", max_num_batched_tokens=2048)

async def main():
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    tasks = [asyncio.create_task(engine.generate([5 + i] * 400, params)) for i in range({count})]
    await asyncio.sleep(0.1)

asyncio.run(main())
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 0], ids=["busy", "idle"])
def test_the_interpreter_can_leave(count: int) -> None:
    """Without a shutdown, and in the middle of a step: a thread that is killed in native code is an abort."""
    command = [sys.executable, "-c", EXIT.format(count=count)]
    left = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (left.returncode, left.stdout, left.stderr) == (0, "done\n", "")


# --- broken


def breaking(engine: AsyncEngine, error: BaseException) -> Callable[[], Any]:
    """Return a step that raises once three requests run."""
    step = core(engine).step

    def broken() -> Any:
        if sum(map(len, core(engine)._by_id.values())) >= 3:
            raise error
        return step()

    return broken


@dies
@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_broken_engine_fails_every_request(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def main() -> None:
        engine = engine_of("near")
        monkeypatch.setattr(core(engine), "step", breaking(engine, error))
        engine.check_health()
        pieces = engine.stream(TEXTS[0], LONG)
        await anext(pieces)
        for task in start(engine, LONG):
            with pytest.raises(EngineDeadError, match=type(error).__name__) as caught:
                await task
            assert caught.value.__cause__ is error
        with pytest.raises(EngineDeadError):
            await read_into([], pieces)
        assert not engine.is_alive
        for call in (engine.generate(TEXTS[0]), checked(engine)):
            with pytest.raises(EngineDeadError) as caught:
                await call
            assert caught.value.__cause__ is error
        await engine.shutdown(drain=True)
        await engine.shutdown(drain=False)
        with pytest.raises(EngineDeadError):
            engine.check_health()

    run(main())


def checked(engine: AsyncEngine) -> Coroutine[Any, Any, None]:
    return asyncio.to_thread(engine.check_health)


@dies
def test_requests_in_a_broken_engine_s_inbox_are_answered(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive while the last step breaks are not forgotten."""

    async def main() -> None:
        engine, entered, leave = engine_of(), asyncio.Event(), thread_module.threading.Event()
        loop = asyncio.get_running_loop()

        def broken() -> Any:
            loop.call_soon_threadsafe(entered.set)
            leave.wait()
            raise ZeroDivisionError

        monkeypatch.setattr(core(engine), "step", broken)
        tasks = start(engine)[:1]
        await entered.wait()
        tasks += start(engine)
        await asyncio.sleep(0)
        leave.set()
        for task in tasks:
            with pytest.raises(EngineDeadError):
                await task
        await engine.shutdown(drain=True)

    run(main())


def test_a_held_request_is_found(engine_of: MakeEngine) -> None:
    """The checks of these tests can fail."""

    async def main() -> None:
        async with engine_of("near") as engine, aclosing(engine.stream(TEXTS[0], LONG)) as pieces:
            await anext(pieces)
            with pytest.raises(AssertionError):
                assert_nothing_is_held(core(engine))

    run(main())
