"""Which models are in memory: they are loaded when asked for, held by requests, and put away when room is needed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from speculant.engine import AsyncEngine
from speculant.errors import ConfigError, ModelError
from speculant.metrics import EngineMetrics
from speculant.serving import ApiError, LoadedModels, ModelSource, ServedModel, check_sizes


class FakeEngine:
    """An engine that takes 10 bytes."""

    memory_bytes = 10
    metrics = EngineMetrics()
    limits = SimpleNamespace(max_num_seqs=4, max_waiting=4, max_model_len=64)

    def __init__(self, is_alive: bool = True) -> None:
        self.is_alive, self.is_there = is_alive, True

    def guard_forms(self) -> None:
        pass

    async def shutdown(self, drain: bool) -> None:
        self.is_alive = False
        await asyncio.sleep(0.01)
        self.is_there = False


class House:
    """Models called a, b and c in the room of `memory` bytes. loads: the names of those that were loaded, in order."""

    def __init__(self, memory: int, expected: int = 10) -> None:
        self.loads, self.errors, self.engines, self.dead = list[str](), list[Exception](), list[FakeEngine](), 0
        self.models = {name: self._model(name, expected) for name in "abc"}
        self.room = LoadedModels([*self.models.values()], memory)

    def _model(self, name: str, expected: int) -> ServedModel:
        def load() -> AsyncEngine:
            if self.errors:
                raise self.errors.pop()
            self.loads.append(name)
            self.dead -= 1
            self.engines.append(FakeEngine(is_alive=self.dead < 0))
            return cast(AsyncEngine, self.engines[-1])

        return ServedModel(load, (name,), (), "own", lambda: expected)

    @property
    def loaded(self) -> str:
        return "".join(name for name, model in self.models.items() if model.loaded is not None)

    @property
    def taken(self) -> int:
        """The bytes of all engines that are not ended."""
        return sum(each.memory_bytes for each in self.engines if each.is_there)

    async def hold(self, name: str) -> None:
        await asyncio.wait_for(self.room.hold(self.models[name]), 10)
        assert self.models[name].loaded is not None

    def release(self, name: str) -> None:
        self.room.release(self.models[name])

    @asynccontextmanager
    async def held(self, name: str) -> AsyncGenerator[None, None]:
        await self.hold(name)
        yield
        self.release(name)

    async def serve(self, name: str) -> None:
        async with self.held(name):
            await asyncio.sleep(0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(autouse=True)
def _engines_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.serving.models.return_memory", lambda: None)  # it takes a second of a test process


async def until_leaving(house: House, name: str) -> None:
    """Wait until a model takes no more requests."""
    async with asyncio.timeout(10):
        while house.room._leaving is not house.models[name]:
            await asyncio.sleep(0.001)


@in_loop
async def test_requests_share_a_load_and_the_engine_stays() -> None:
    house = House(100)
    assert (house.loaded, house.models["a"].state) == ("", "unloaded")
    await asyncio.gather(*(house.serve("a") for _ in range(5)))
    await house.serve("b")
    assert (house.loads, house.loaded, house.models["a"].state) == (["a", "b"], "ab", "loaded")


@in_loop
async def test_the_one_that_was_used_longest_ago_is_put_away() -> None:
    house = House(25)
    for name in "abac":
        await house.serve(name)
    assert (house.loads, house.loaded) == (["a", "b", "c"], "ac")
    await house.serve("b")
    assert house.loaded == "bc"


@in_loop
async def test_a_held_model_is_not_put_away() -> None:
    house = House(15)
    async with house.held("a"):
        waiting = asyncio.create_task(house.serve("b"))
        await until_leaving(house, "a")
        assert (house.loaded, waiting.done()) == ("a", False)
    await waiting
    assert house.loaded == "b"


@in_loop
async def test_an_idle_model_goes_before_one_that_was_used_longer_ago() -> None:
    house = House(25)
    async with house.held("a"):
        await house.serve("b")
        await house.serve("c")
        assert house.loaded == "ac"


@in_loop
async def test_two_busy_models_take_turns() -> None:
    """Without an end of A's requests, B would never be loaded: so new ones of A wait for B's, and no longer."""
    house, served = House(15), list[str]()

    async def serve(name: str) -> None:
        async with house.held(name):
            served.append(name)
            await asyncio.sleep(0.001)

    await house.hold("a")
    tasks = [asyncio.create_task(serve("b")) for _ in range(2)]
    await until_leaving(house, "a")
    tasks += [asyncio.create_task(serve(name)) for name in "aabb"]
    await asyncio.sleep(0.01)
    assert served == [], "a request of a model that is to leave went first"
    house.release("a")
    await asyncio.gather(*tasks)
    assert (sorted(served), house.loads) == (sorted("bbaabb"), ["a", "b", "a"])
    assert [*served[:4]] == [*"bbbb"], "those that waited while the model was loaded hold it at once"


@in_loop
async def test_a_model_stays_if_nobody_waits_for_the_other_any_more() -> None:
    house = House(15)
    async with house.held("a"):
        waiting = asyncio.create_task(house.serve("b"))
        await until_leaving(house, "a")
        other = asyncio.create_task(house.serve("a"))
        await asyncio.sleep(0.01)
        assert not other.done(), "it should leave"
        waiting.cancel()
        await other  # although the first one still holds it
        assert (house.loads, house.loaded, house.models["b"].state) == (["a"], "a", "unloaded")


@in_loop
async def test_an_error_is_told_and_the_next_request_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """Without paths of the server."""
    house = House(15)
    house.errors.append(ModelError("there is no config.json in /secret/path", "name another folder."))
    results = await asyncio.gather(*(house.serve("a") for _ in range(3)), return_exceptions=True)
    texts = {each.message for each in results if isinstance(each, ApiError)}
    assert texts == {"The model 'a' could not be loaded. The server's log has the reason."}
    assert "a can't be loaded: there is no config.json" in caplog.text
    assert house.models["a"].state == "failed"
    house.errors.append(OSError("/secret/path"))
    with pytest.raises(ApiError) as caught:
        await house.serve("a")
    assert (caught.value.status, "secret" in caught.value.message) == (503, False)
    await house.serve("a")
    assert house.models["a"].state == "loaded"


@in_loop
async def test_nothing_is_put_away_for_a_model_that_does_not_fit() -> None:
    house = House(10)
    await house.serve("a")
    house.models["b"].expected_bytes = lambda: 11
    says = "could not be loaded. It takes 11 B, and all models may take 10 B. Fix: raise --memory"
    with pytest.raises(ApiError, match=says):
        await house.serve("b")
    assert (house.loads, house.loaded) == (["a"], "a")


@in_loop
async def test_a_model_that_turns_out_too_large_is_loaded_once() -> None:
    house = House(9, expected=1)
    for _ in range(2):
        with pytest.raises(ApiError, match="could not be loaded"):
            await house.serve("a")
    assert (house.loads, house.loaded) == (["a"], "")


@in_loop
async def test_room_is_made_for_the_size_that_a_model_has() -> None:
    house = House(15, expected=1)
    await house.serve("a")
    await house.serve("b")
    assert house.loaded == "b"


@in_loop
async def test_a_dead_engine_is_replaced() -> None:
    house = House(15)
    await house.serve("a")
    cast(FakeEngine, house.models["a"].engine).is_alive = False
    assert house.models["a"].state == "failed"
    await house.serve("a")
    assert (house.loads, house.models["a"].state) == (["a", "a"], "loaded")


@in_loop
async def test_waiting_requests_are_refused_when_the_server_ends() -> None:
    house = House(15)
    async with house.held("a"):
        waiting = asyncio.create_task(house.serve("b"))
        await until_leaving(house, "a")
        house.room.refuse_all(ApiError(503, "over"))
        with pytest.raises(ApiError, match="over"):
            await waiting
    assert house.loads == ["a"]


@in_loop
async def test_a_request_that_ends_with_the_load_holds_nothing() -> None:
    house = House(15)
    model = house.models["a"]
    waiting = asyncio.create_task(house.room.hold(model))
    while not model.users:
        await asyncio.sleep(0)
    waiting.cancel()  # in the moment between the load's end and the request's
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), model.users) == (True, 0)


@in_loop
async def test_a_larger_engine_than_expected_is_not_kept_waiting() -> None:
    house = House(15, expected=1)
    async with house.held("a"):
        waiting = asyncio.create_task(house.serve("b"))
        await until_leaving(house, "a")
        assert (house.loads, house.models["b"].bytes, house.taken) == (["a", "b"], 10, 10)
        waiting.cancel()
        while house.models["b"].loading is not None:
            await asyncio.sleep(0)
        late = asyncio.create_task(house.serve("b"))  # now its size is known
        await until_leaving(house, "a")
        assert house.loads == ["a", "b"]
    await late
    assert (house.loads, house.loaded) == (["a", "b", "b"], "b")


@in_loop
async def test_a_request_is_served_that_comes_while_its_engine_ends() -> None:
    """The engine was too large to stay beside a busy one, and nobody waited for it any more."""
    house = House(15, expected=1)
    async with house.held("a"):
        waiting = asyncio.create_task(house.serve("b"))
        while house.loads != ["a", "b"] or house.engines[-1].is_alive:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert house.engines[-1].is_there, "its engine is not being ended"
        late = asyncio.create_task(house.serve("b"))
        await until_leaving(house, "a")
    await late
    assert (house.loads, house.loaded) == (["a", "b", "b"], "b")


@in_loop
async def test_an_engine_that_dies_at_once_is_replaced() -> None:
    house = House(15)
    house.dead = 1
    await house.serve("a")
    assert house.loads == ["a", "a"]


def test_the_largest_model_is_refused_at_the_start() -> None:
    """The error names the memory with which it fits, where its keys and values have a share of it."""

    def broken() -> int:
        raise ModelError("there is no config.json", "name another folder.")

    sizes: dict[str, Callable[[], int]] = {"a": lambda: 100, "b": lambda: 3 * 2**20, "c": broken}
    sources = [ModelSource((name,), lambda: cast(AsyncEngine, FakeEngine()), size) for name, size in sizes.items()]
    check_sizes(sources, 3 * 2**20, 0.0)
    with pytest.raises(ConfigError, match="^b: it takes 3 MiB, and all models may take 2 KiB\n.*--memory to 3 MiB, or"):
        check_sizes(sources, 2**11 + 1, 0.0)
    with pytest.raises(ConfigError, match="--memory to 4 MiB, or"):  # a quarter of 2 MiB is for keys and values
        check_sizes([replace(sources[1], expected_bytes=lambda: 7 * 2**19)], 2 * 2**20, 0.25)
