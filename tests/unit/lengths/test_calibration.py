"""Costs are measured on the engine's own parts, kept on disk, and measured again if the file is damaged."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams, files
from speculant.drafting import ModelDrafter
from speculant.files import Run
from speculant.kernels import usable_sets
from speculant.lengths import LEARNT, NO_ATTENTION, measuring
from speculant.metrics import StepTiming
from speculant.models import Batch, SequenceInput
from speculant.types import DraftTree, Request
from tests.models import Checkpoints

ADAPTIVE = {"draft_length": "adaptive"}
BACKENDS = ["reference", *(["native"] if usable_sets() else [])]


def _fail(*arguments: Any) -> Any:
    raise RuntimeError("no")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "BUDGET_S", 0.05)
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 2)
    return tmp_path / "speculant" / "costs"


def engine(checkpoints: Checkpoints, **arguments: Any) -> LLM:
    arguments = {"draft_quantization": "none", "dtype": "float64", **arguments}
    return LLM(checkpoints.target, checkpoints.near, speculative_config=ADAPTIVE, **arguments)


def test_calibration_leaves_the_engine_as_it_was(checkpoints: Checkpoints, kept: Path) -> None:
    llm = engine(checkpoints)
    assert llm.engine.metrics.steps == llm.engine.metrics.drafter_errors == 0
    llm.engine.check()
    for cache in (llm.engine._context.cache, *llm.engine._drafters.caches):
        assert cache.free_tokens() == cache.num_blocks * cache.block_size
    plain = LLM(checkpoints.target, dtype="float64").generate("def f", SamplingParams(temperature=0, max_tokens=24))
    drafted = llm.generate("def f", SamplingParams(temperature=0, max_tokens=24))
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_calibration_is_kept_and_read_again(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ticks = itertools.count()  # a clock on which everything takes the same time
        patch.setattr(measuring.time, "perf_counter", lambda: 2e-3 * next(ticks))
        engine(checkpoints)
    (file,) = kept.glob("*.json")
    assert {"1", "2", "8"} <= json.loads(file.read_text())["passes"].keys()
    monkeypatch.setattr(measuring, "timing", lambda *given: pytest.fail("it was measured again"))
    engine(checkpoints)


@pytest.mark.skipif(len(usable_sets()) < 2, reason="the native kernels have one instruction set here")
def test_each_instruction_set_has_curves_of_its_own(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: 2e-3 * next(ticks))
    for count, isa in enumerate(usable_sets()[-2:], 1):
        monkeypatch.setenv("SPECULANT_ISA", isa)
        for _ in range(2):
            engine(checkpoints, kernels="native", dtype="float32")
            assert len([*kept.glob("*.json")]) == count


def test_calibration_computes_other_tokens_in_each_row(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of equal tokens would use the same experts, and passes of many rows would seem to be cheap."""
    passes, own = list[list[int]](), measuring.build_batch

    def record(inputs: Sequence[SequenceInput], *rest: Any) -> Batch:
        passes.extend([*each.tokens, *each.tree.token_list] for each in inputs)
        return own(inputs, *rest)

    monkeypatch.setattr(measuring, "build_batch", record)
    engine(checkpoints)
    few = [tokens for tokens in passes if 1 < len(tokens) <= 16]
    assert few
    assert all(len(set(tokens)) == len(tokens) for tokens in few)
    assert all(set(tokens) != set(after) for tokens, after in pairwise(few)), "after many passes, tokens come again"
    assert len({tokens[0] for tokens in passes if len(tokens) == 1}) > 2


def test_spread_tokens_differ() -> None:
    assert len({measuring.spread_token(place, 1000) for place in range(300)}) == 300
    assert {measuring.spread_token(place, 7) for place in range(100)} == set(range(7))


def test_calibration_measures_the_time_of_attention(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that take 1 us for each key of each row, and 1 ms beside that."""
    seen = list[tuple[int, int]]()
    timing = measuring.timing

    def rounds(
        run: partial[None], sizes: list[int], *rest: Any, **options: Any
    ) -> Generator[None, None, measuring.Times]:
        if isinstance(run, partial):
            keys = 1 + run.args[1]
            seen.extend((keys, size) for size in sizes)
            with rest[0]():
                run(sizes[0])
            yield
            return {rows: [Run(1e-3 + 1e-6 * keys * rows, 1e-3)] for rows in sizes}
        return (yield from timing(run, sizes, *rest, **options))

    monkeypatch.setattr(measuring, "timing", rounds)
    costs = engine(checkpoints).engine._context.draft_length.policy._costs  # type: ignore[attr-defined]
    assert {keys for keys, _ in seen} == {1, 256 - measuring.MANY_ROWS + 1}
    assert [each * (1e-3 + 1e-6) for each in costs.keys] == pytest.approx([1e-6, 1e-6], rel=0.01)
    before = {*kept.glob("*.json")}
    engine(checkpoints, max_model_len=64)
    (short,) = {*kept.glob("*.json")} - before
    assert json.loads(short.read_text())["keys"] == [0.0, 0.0], "so few tokens do not show it"


def test_calibration_measures_the_time_of_reading(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that takes 10 us for each token and 1 us for each key before it, on a clock that counts them."""
    clock = [0.0]

    def propose(self: object, requests: list[Request], limits: list[int]) -> list[DraftTree]:
        clock[0] += sum(1e-5 * length + 1e-6 * length**2 / 2 for length in map(len, (each.tokens for each in requests)))
        return [DraftTree.chain([1] * limit) for limit in limits]

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measuring, "TEXTS", (50, 1024))
    costs = engine(checkpoints).engine._context.draft_length.policy._costs  # type: ignore[attr-defined]
    (reading,) = costs.readings.values()
    assert tuple(reading) == pytest.approx((1e-5, 1e-6))
    assert reading.seconds(100, 200) == pytest.approx(100 * (1e-5 + 150e-6))


def test_calibration_of_a_slow_model_measures_few_sizes(kept: Path) -> None:
    asked: list[int] = []

    def run(size: int) -> None:
        asked.append(size)
        time.sleep(0.03)

    assert measuring.timed(run, [1, 8, 4, 2], []).keys() == {1, 8}
    assert asked == [1, 1, 8]
    asked.clear()
    wanted: dict[str, Any] = {"least": measuring.LEAST_ROWS, "runs": measuring.LEAST_PASSES, "share": 0.1}
    rounds = measuring.finished(measuring.timing(run, [1, 8, 16, 4], **wanted, is_warm=True))
    assert {size: len(own) for size, own in rounds.items()} == {1: 2, 8: 1, 16: 1}
    assert asked == [1, 8, 16, 1], "nothing runs without being counted"


def test_calibration_measures_many_rows_of_slow_models(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line through a few rows does not show the cost of a batch with drafts."""
    own, clock = measuring.build_batch, [0.0]

    def slow(inputs: Sequence[SequenceInput], *rest: Any) -> Batch:
        (only,) = inputs
        clock[0] += 0.1 + 0.01 * (len(only.tokens) + only.tree.size)
        return own(inputs, *rest)

    monkeypatch.setattr(measuring, "build_batch", slow)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    engine(checkpoints)
    (file,) = kept.glob("*.json")
    assert json.loads(file.read_text())["passes"] == pytest.approx({"1": 0.11, "8": 0.18, "16": 0.26})


def test_calibration_takes_the_least_of_equal_and_larger_sizes(kept: Path) -> None:
    sleeps = {1: 0.004, 2: 0.001, 4: 0.002}
    found = measuring.timed(lambda size: time.sleep(sleeps[size]), [1, 4, 2], [])
    assert found[1] == found[2] <= found[4]


STEADY_RUNS = [Run(1.0, 1.0), Run(1.1, 1.0), Run(1.2, 1.0)]


@pytest.mark.parametrize(
    ("runs", "spread"),
    [
        ([STEADY_RUNS], 1.1),
        ([[Run(1.0, 1.0), Run(1.9, 1.0), Run(3.0, 1.0)]], 1.9),
        ([[Run(2.0, 1.0)] * 3], 2.0),
        ([[Run(1.0, 1.0)] * 3, [Run(9e-3, 1e-3)] * 3], 1.009 / 1.001),
    ],
    ids=["steady", "some were delayed", "all were delayed", "short ones weigh little"],
)
def test_spread_is_typical_over_least_processor_time(runs: list[list[Run]], spread: float) -> None:
    assert files.spread_of(runs) == pytest.approx(spread)


def on_clock(monkeypatch: pytest.MonkeyPatch, clock: list[float], busy: float) -> list[int]:
    """Let passes take 10 ms a row of processor time, and `busy` times this; return a list that gets their rows."""
    own, passes, processor = measuring.build_batch, list[int](), [0.0]

    def timed(inputs: Sequence[SequenceInput], *rest: Any) -> Batch:
        (only,) = inputs
        passes.append(len(only.tokens) + only.tree.size)
        processor[0] += 0.01 * passes[-1]
        clock[0] += busy * 0.01 * passes[-1]
        return own(inputs, *rest)

    for name, few in (("ROWS", (1, 8, 4)), ("DEPTHS", (1, 2)), ("SEQUENCES", (1,)), ("TEXTS", ()), ("LONG_CONTEXT", 0)):
        monkeypatch.setattr(measuring, name, few)
    monkeypatch.setattr(files, "STEADY", 1.5)
    monkeypatch.setattr(measuring, "build_batch", timed)
    monkeypatch.setattr(files.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(files.time, "thread_time", lambda: processor[0])
    return passes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("busy", [1.2, 2.0], ids=["steady", "busy"])
def test_calibration_of_a_busy_machine_is_made_again(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch, busy: float, backend: str
) -> None:
    """All passes took twice as long as they had the processor: nothing but that shows that it was busy."""
    passes = on_clock(monkeypatch, [0.0], busy)
    assert engine(checkpoints, kernels=backend, dtype="float32").speculating
    assert len(list(kept.glob("*.json"))) == (busy < 1.5)
    passes.clear()
    engine(checkpoints, kernels=backend, dtype="float32")
    assert bool(passes) == (busy > 1.5)


def test_measure_measures_anew(checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets what was measured on this machine, and nothing of another one that keeps its files here."""
    passes = on_clock(monkeypatch, [0.0], 1.0)
    engine(checkpoints)
    (file,) = kept.glob("*.json")
    other, choice = kept / f"{'0' * 32}.json", file.with_suffix(".precision.json")
    for each in (other, choice):
        each.write_text("{}")
    file.write_text(file.read_text().replace("0.01", "0.07"))
    passes.clear()
    engine(checkpoints)
    assert not passes
    engine(checkpoints, measure=True)
    assert passes
    assert json.loads(file.read_text())["passes"]["1"] == pytest.approx(0.01)
    assert other.exists()
    assert not choice.exists()


@pytest.mark.parametrize(("ratio", "stays"), [(1.0, True), (1.6, True), (2.5, False), (0.6, True), (0.3, False)])
def test_calibration_that_steps_disagree_with_is_dropped(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, stays: bool
) -> None:
    """The figures have a spread of 1.2, which a ratio may exceed by half."""
    with monkeypatch.context() as patch:
        on_clock(patch, [0.0], 1.2)
        policy = engine(checkpoints).engine._context.draft_length.policy  # type: ignore[attr-defined]
    (file,) = kept.glob("*.json")
    plain_s = ratio * policy._costs.passes.at(1)
    for step in range(LEARNT):
        assert file.exists(), step
        policy._costs.observe_plain(step, 1, 1, StepTiming(0.0, 0.0, plain_s), NO_ATTENTION)
    assert file.exists() == stays


DAMAGED = [
    "",
    "[]",
    "{",
    '{"passes": {"1": 1}, "keys": [0, 0], "drafts": {}, "readings": {}}',
    '{"passes": {}, "drafts": {}, "spread": 1}',
    '{"passes": {"1": -1}, "keys": [0, 0], "drafts": {}, "readings": {}, "spread": 1}',
]
DAMAGED += [
    '{"passes": {"1": 1}, "keys": [0], "drafts": {}, "readings": {}, "spread": 1}',
    '{"passes": {"1": 1}, "drafts": {}, "spread": 1}',
    '{"passes": {"1": 1}, "keys": [0, -1], "drafts": {}, "readings": {}, "spread": 1}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_calibration_that_is_damaged_is_not_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "costs.json").write_text(content)
    assert measuring.read_curves(tmp_path / "costs.json") is None


@pytest.mark.parametrize(
    "content", [pytest.param(text, marks=[] if text == DAMAGED[-1] else pytest.mark.slow) for text in DAMAGED]
)
def test_calibration_that_is_damaged_is_made_again(checkpoints: Checkpoints, kept: Path, content: str) -> None:
    engine(checkpoints)
    (file,) = kept.glob("*.json")
    file.write_text(content)
    engine(checkpoints)
    assert json.loads(file.read_text())["passes"]["1"] > 0


def test_calibration_survives_a_drafter_that_fails(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelDrafter, "propose", _fail)
    llm = engine(checkpoints)
    assert llm.generate("def f", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].finish_reason == "length"


def test_calibration_works_without_a_place_to_keep_it(
    checkpoints: Checkpoints, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert engine(checkpoints).speculating


def test_calibration_keeps_a_bounded_number_of_files(tmp_path: Path) -> None:
    for index in range(files.MOST_FILES + 5):
        files.write_file(tmp_path / f"{index}.json", {"passes": {1: 1.0}, "drafts": {}})
    assert len([*tmp_path.glob("*.json")]) == files.MOST_FILES
