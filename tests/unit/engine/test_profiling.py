"""The trace of an engine's steps: valid JSON with the phases by name, and nothing of it outside the block."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.engine import PHASES, check_trace_path, profiled, unmarked
from speculant.errors import ConfigError
from tests.models import Checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> LLM:
    return LLM(checkpoints.target, checkpoints.near, dtype="float64")


def _ranges(text: str) -> list[dict[str, Any]]:
    events = json.loads(text)["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


def test_trace_has_every_phase_of_every_step(llm: LLM, tmp_path: Path) -> None:
    path, before = tmp_path / "trace.json", llm.engine.metrics.steps
    with profiled(llm.engine, path):
        llm.generate(["hello"], GREEDY)
    steps = llm.engine.metrics.steps - before
    assert steps > 1
    assert Counter(event["name"] for event in _ranges(path.read_text())) == dict.fromkeys(PHASES, steps)


def test_trace_phases_come_in_order_and_apart(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with profiled(llm.engine, path):
        llm.generate(["hello"], GREEDY)
    ranges = sorted(_ranges(path.read_text()), key=lambda event: event["ts"])
    assert [event["name"] for event in ranges[: len(PHASES)]] == list(PHASES)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(ranges))


def test_trace_changes_no_token(llm: LLM, tmp_path: Path) -> None:
    plain = llm.generate(["hello"], GREEDY)
    with profiled(llm.engine, tmp_path / "trace.json"):
        traced = llm.generate(["hello"], GREEDY)
    assert traced[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_trace_is_compressed_by_its_name(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with profiled(llm.engine, path):
        llm.generate(["hello"], GREEDY)
    assert {event["name"] for event in _ranges(gzip.decompress(path.read_bytes()).decode())} == set(PHASES)


def test_trace_is_written_when_the_block_raises(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    stream = llm.stream("hello", GREEDY)
    with pytest.raises(KeyError), profiled(llm.engine, path):
        raise KeyError(next(stream).token)
    stream.close()
    assert _ranges(path.read_text())
    assert llm.engine.mark is unmarked


def test_no_path_profiles_nothing(llm: LLM) -> None:
    with profiled(llm.engine, None):
        assert llm.engine.mark is unmarked


@pytest.mark.parametrize(("name", "problem"), [(".", "is a folder"), ("nowhere/trace.json", "does not exist")])
def test_trace_path_is_checked_first(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_trace_path(tmp_path / name)
