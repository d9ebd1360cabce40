"""The front ends share one engine: they reach it within a turn."""

from __future__ import annotations

import pytest

from tests.architecture.source import Module, load_package
from tests.architecture.turns import engines_out_of_turn


def test_front_ends_reach_their_engine_within_a_turn() -> None:
    assert [message for module in load_package() for message in engines_out_of_turn(module)] == []


@pytest.mark.parametrize(
    "body",
    [
        "def __init__(self): self.engine = self._runtime.engine",
        "def __init__(self, engine): self._engine, self._ids = engine, 0",
        "def __init__(self, runtime): self._runtime, self._engine = runtime, runtime.engine",
        "def reset(self): return self.engine.reset_prefix_cache()",
        "def reset(self): return self._runtime.engine.reset_prefix_cache()",
        "def keep(self):\n        with self.turn as engine: self.kept = engine",
    ],
)
def test_an_engine_out_of_turn_is_found(body: str) -> None:
    for name in ("engine.llm", "engine.async_engine"):
        assert len(engines_out_of_turn(Module(name, f"class A:\n    {body}\n"))) == 1


def test_other_packages_take_no_engine_from_a_user() -> None:
    text = "def f(llm): return llm.engine.metrics\n"
    assert [len(engines_out_of_turn(Module(name, text))) for name in ("serving.app", "lab.bench.runs")] == [1, 0]


@pytest.mark.parametrize(
    "body",
    [
        "def __init__(self): self.turn = EngineTurn(self._runtime.engine)",
        "def reset(self):\n        with self._turn as engine: return engine.reset_prefix_cache()",
        "def _step(self, engine): return engine.step()",
    ],
)
def test_a_turn_passes(body: str) -> None:
    assert engines_out_of_turn(Module("engine.llm", f"class A:\n    {body}\n")) == []
