"""`--profile` of the commands that run an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from speculant.engine import PHASES
from speculant.errors import ConfigError
from tests.commands import error_of, invoke
from tests.models import Checkpoints

SMALL = ("--num-prompts", "1", "--max-tokens", "4", "--rounds", "1")


def _invoke(checkpoints: Checkpoints, *arguments: str) -> Result:
    models = ("--model", checkpoints.target, "--draft-model", checkpoints.near)
    return invoke(*arguments, *models, "--dtype", "float64", "--spec-length", 2)


def _phases(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] in PHASES}


@pytest.mark.parametrize(
    "form", [(), pytest.param(("--json",), marks=pytest.mark.slow), ("--n", "2")], ids=["text", "json", "samples"]
)
def test_generate_writes_a_trace(checkpoints: Checkpoints, tmp_path: Path, form: tuple[str, ...]) -> None:
    path = tmp_path / "trace.json"
    result = _invoke(checkpoints, "generate", "hello", "--max-tokens", "4", "--profile", str(path), *form)
    assert _phases(path) == set(PHASES)
    assert str(path) in result.stderr
    assert "perfetto" in result.stderr
    assert str(path) not in result.stdout


@pytest.mark.parametrize("benchmark", ["throughput", pytest.param("latency", marks=pytest.mark.slow)])
def test_bench_writes_a_trace_and_prints_its_path(checkpoints: Checkpoints, tmp_path: Path, benchmark: str) -> None:
    path = tmp_path / "trace.json"
    result = _invoke(checkpoints, "bench", benchmark, *SMALL, "--profile", str(path), "--json")
    assert _phases(path) == set(PHASES)
    assert [note for note in json.loads(result.stdout)["notes"] if "profiler" in note]


def test_profile_path_is_refused_before_loading(tmp_path: Path) -> None:
    error = error_of("generate", "hello", "--model", "/nowhere", "--profile", tmp_path)
    assert isinstance(error, ConfigError)
    assert "is a folder" in error.problem
