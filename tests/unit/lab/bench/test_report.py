"""The report: plain values for JSON, and tables of the same values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from speculant.config import EngineConfig
from speculant.engine import build_engine
from speculant.lab.bench import (
    ROWS,
    Bench,
    BenchCase,
    Grid,
    Workload,
    both_ways,
    conclusions,
    described_rounds,
    document,
    heading,
    measure,
    one_at_a_time,
    tables,
    ways_of,
)
from speculant.params import SamplingParams
from tests.models import Checkpoints
from tests.unit.lab.bench.test_measuring import make_run

WORKLOAD = Workload("test", [[1], [2, 3]])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def _document(config: EngineConfig, params: SamplingParams = GREEDY, alone_too: bool = False) -> dict[str, Any]:
    runtime = build_engine(config)
    modes = both_ways(params, runtime.drafting)
    every = {**modes, **one_at_a_time(modes)} if alone_too else modes
    case = measure(ways_of(Bench(runtime), every), WORKLOAD, 2, lambda name: None)
    return dict(json.loads(json.dumps(document("throughput", config, runtime, [case]))))


def text_of(grids: Iterable[Grid]) -> str:
    """Return the text of tables."""
    return "\n".join(" | ".join(row) for grid in grids for row in ([grid.title], grid.header, *grid.rows))


@pytest.fixture(scope="module")
def case(checkpoints: Checkpoints) -> dict[str, Any]:
    """A case of all modes."""
    config = EngineConfig(checkpoints.target, checkpoints.near, dtype="float64")
    [found] = _document(config, alone_too=True)["cases"]
    return dict(found)


@pytest.mark.parametrize("benchmark", list(ROWS))
def test_tables_have_every_row_and_mode(case: dict[str, Any], benchmark: str) -> None:
    shown = text_of(tables(benchmark, case))
    assert all(shown.count(row.label.strip()) >= 2 for row in ROWS[benchmark])
    assert shown.count("speculative") == shown.count("ratio") == 2
    assert shown.count("One at a time") == 1
    assert set(case["runs"]) == {"plain", "speculative", "plain_sequential", "speculative_sequential"}
    assert len(case["ratios"]) == 4
    assert len([line for line in conclusions(case) if "tokens/s" in line]) == 4
    assert len([line for line in conclusions(case) if line.endswith("4 of 4")]) == 3


def test_without_a_drafter_there_is_no_ratio(checkpoints: Checkpoints) -> None:
    value = _document(EngineConfig(checkpoints.target, use_speculative_decoding=False))
    [case] = value["cases"]
    assert value["speculation"] == {"on": False, "detail": "use_speculative_decoding is False"}
    assert case["ratios"] == {}
    assert case["outputs"] == {"compared": False, "outputs": 4, "identical": {}}
    assert "ratio" not in text_of(tables("latency", case))
    assert list(conclusions(case)) == []


def test_speculation_has_a_description_or_a_reason(checkpoints: Checkpoints) -> None:
    config = EngineConfig(checkpoints.target, checkpoints.near, spec_length=3, draft_quantization="none")
    assert _document(config)["speculation"] == {"on": True, "detail": "draft_model, 3 tokens a step, verified by match"}
    asked = SamplingParams(temperature=0, max_tokens=4, speculation={"num_speculative_tokens": 2})
    detail = "draft_model, 3 tokens a step (2 for these requests), verified by match"
    assert _document(config, asked)["speculation"] == {"on": True, "detail": detail}
    off = SamplingParams(temperature=0, max_tokens=4, speculation=False)
    assert _document(config, off)["speculation"] == {"on": False, "detail": "switched off for these requests"}


def test_sampled_outputs_are_not_compared(checkpoints: Checkpoints) -> None:
    config = EngineConfig(checkpoints.target, checkpoints.near)
    [case] = _document(config, SamplingParams(max_tokens=4))["cases"]
    assert case["outputs"] == {"compared": False, "outputs": 4, "identical": {}}
    assert "outputs were not compared: sampled without a seed" in list(conclusions(case))


def test_a_difference_is_reported_with_its_likely_cause(checkpoints: Checkpoints) -> None:
    config = EngineConfig(checkpoints.target, checkpoints.near)
    case = BenchCase(WORKLOAD, GREEDY, {"plain": [make_run([[1], [2]])], "speculative": [make_run([[1], [3]], 0.5)]})
    [value] = document("latency", config, build_engine(config), [case])["cases"]
    said = list(conclusions(value))
    assert said[0] == "speculative: 2.00 times the tokens/s of plain"
    assert said[1].startswith("outputs of speculative identical to plain: 1 of 2; in float32 and bfloat16")


def test_a_drafter_that_learns_has_a_note(checkpoints: Checkpoints) -> None:
    learning = EngineConfig(checkpoints.target, speculative_config={"method": "synthetic"})
    assert "learns" in " ".join(_document(learning)["notes"])
    assert _document(EngineConfig(checkpoints.target, checkpoints.near))["notes"] == []


def test_the_heading_describes_the_run(checkpoints: Checkpoints) -> None:
    [case] = _document(EngineConfig(checkpoints.target))["cases"]
    assert (
        heading(case)
        == "2 prompts (test) of 1 to 2 tokens, 6 more each, greedy; 2 rounds, too few for a median: a quick look"
    )
    case.update(request_rate=2.5, prompt_tokens={"min": 3, "max": 3}, sampling={"temperature": 0.5, "max_tokens": 9})
    assert "of 3 tokens, 2.5 arriving per second, 9 more each, temperature 0.5" in heading(case)


def test_three_rounds_have_medians_and_two_are_too_few() -> None:
    assert described_rounds(1).startswith("1 round, too few")
    assert "2 rounds, too few" in described_rounds(2)
    assert described_rounds(3) == "medians of 3 rounds, with quartiles"
