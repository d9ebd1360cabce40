"""Costs that are unknown at the start are measured between the first steps, which do not wait and draft nothing."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.engine import Engine, build
from speculant.lengths import Measurement, measuring
from speculant.types import StepOutput
from tests.models import Checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "START_S", 0.0)
    monkeypatch.setattr(build, "LARGE_BYTES", 0)
    monkeypatch.setattr(measuring, "BUDGET_S", 0.02)
    return tmp_path / "speculant" / "costs"


def adaptive(checkpoints: Checkpoints, **arguments: Any) -> LLM:
    arguments = {"draft_quantization": "none", "dtype": "float64", "max_num_seqs": 2, **arguments}
    return LLM(checkpoints.target, checkpoints.near, speculative_config={"draft_length": "adaptive"}, **arguments)


def slices_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each call of the measurement, how many steps there were before."""
    steps, run = list[int](), engine.measurement.run

    def noting(seconds: float) -> None:
        steps.append(engine.metrics.steps)
        run(seconds)

    monkeypatch.setattr(engine.measurement, "run", noting)
    return steps


def test_first_token_does_not_wait_for_measurements(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = adaptive(checkpoints)
    engine = llm.engine
    assert engine.measurement.active, "only one slice has run"
    slices = slices_of(engine, monkeypatch)
    engine.add_request([1, 2, 3, 4], GREEDY, "first")
    assert engine.step(), "the step of the prompt has no token"
    assert slices == []
    engine.step()
    assert slices == [1]


def test_costs_are_complete_after_some_steps(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing is drafted; then drafts begin, and the next start reads the costs."""
    monkeypatch.setattr("speculant.lengths.measuring.DISAGREE", math.inf)  # although the tests keep the machine busy
    llm, drafted = adaptive(checkpoints), list[bool]()
    engine, texts = llm.engine, list[StepOutput]()
    engine.add_request([1, 2, 3, 4], GREEDY, "first")
    while engine.has_unfinished():
        drafted.append(engine.measurement.active and engine.metrics.draft_tokens > 0)
        texts += engine.step()
        engine.check()
    assert not any(drafted), "something was drafted before the costs were known"
    assert not engine.measurement.active
    assert engine.metrics.draft_tokens > 0
    assert len([*kept.glob("*.json")]) == 1
    assert engine.metrics.drafter_errors == 0
    assert not adaptive(checkpoints).engine.measurement.active
    plain = LLM(checkpoints.target, dtype="float64", use_speculative_decoding=False).generate([[1, 2, 3, 4]], GREEDY)
    assert [output.token for output in texts if output.token is not None] == list(plain[0].outputs[0].token_ids)


def test_a_waiting_prompt_goes_first(checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = adaptive(checkpoints).engine
    slices = slices_of(engine, monkeypatch)
    engine.add_request([1, 2, 3, 4], GREEDY, "first")
    for _ in range(4):
        engine.step()
    before = len(slices)
    assert before
    engine.add_request([5, 6, 7], GREEDY, "second")
    engine.step()
    assert len(slices) == before, "a new prompt waited for a measurement"


def test_slices_hold_no_blocks_of_the_target(checkpoints: Checkpoints, kept: Path) -> None:
    """And they are left out while requests leave too few of them: the measurement ends, and is not kept."""
    engine = adaptive(checkpoints).engine
    cache, free = engine._context.cache, set[int]()
    while engine.measurement.active:
        free.add(cache.free_tokens())
        engine.measurement.run(0.0)
    assert free == {cache.num_blocks * cache.block_size}
    (file,) = kept.glob("*.json")
    other = adaptive(checkpoints, max_model_len=128).engine
    held = other._context.cache
    held.reserve(99, held.free_tokens())
    other.measurement.finish()
    assert not other.measurement.active
    assert [*kept.glob("*.json")] == [file]
    held.release(99)
    assert held.free_tokens() == held.num_blocks * held.block_size


@pytest.mark.slow
def test_a_steady_load_does_not_end_drafts(checkpoints: Checkpoints, kept: Path) -> None:
    """A new request goes first, but not always."""
    engine = adaptive(checkpoints).engine
    for number in range(2000):
        if engine.accepts(1):
            engine.add_request([1, 2, number % 50], SamplingParams(temperature=0, max_tokens=1), f"{number}")
        engine.step()
        if not engine.measurement.active:
            break
    assert not engine.measurement.active
    assert number > 10


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_slots_are_measured_before_requests_hold_them(checkpoints: Checkpoints, kept: Path, max_num_seqs: int) -> None:
    engine = adaptive(checkpoints, kv_cache_backend="slotted", max_num_seqs=max_num_seqs).engine
    assert not engine.measurement.active
    assert [*kept.glob("*.json")]


def test_an_interrupted_measurement_begins_anew() -> None:
    def slices() -> Any:
        made.append(0)
        yield
        if len(made) == 1:
            raise KeyboardInterrupt

    made, measurement = list[int](), Measurement()
    measurement.begin(slices)
    with pytest.raises(KeyboardInterrupt):
        measurement.finish()
    assert measurement.active
    measurement.finish()
    assert made == [0, 0]
    assert not measurement.active


def test_a_measurement_lasts_as_long_as_it_may() -> None:
    def slices() -> Any:
        for place in range(10):
            done.append(place)
            time.sleep(0.01)
            yield

    done, measurement = list[int](), Measurement()
    measurement.begin(slices)
    measurement.run(0.0)
    assert done == [0], "one slice runs in any case"
    measurement.run(0.025)
    assert 2 <= len(done) <= 4
    measurement.finish()
    assert len(done) == 10
    assert not measurement.active


def test_a_measurement_that_fails_ends(caplog: pytest.LogCaptureFixture) -> None:
    def slices() -> Any:
        yield
        raise RuntimeError("no")

    measurement = Measurement()
    measurement.begin(slices)
    measurement.finish()
    assert not measurement.active
    assert "the measurement of costs failed" in caplog.text
