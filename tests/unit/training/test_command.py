"""`speculant train lm`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculant.cli import train
from speculant.errors import ConfigError

SMALL = (
    "--vocab-size 300 --hidden 16 --intermediate 32 --layers 1 --heads 2 --kv-heads 1 --max-positions 64 --seq 32 "
    "--batch 2 --steps 4"
).split()


def test_a_target_and_its_draft_are_trained_by_two_commands(corpus_folder: Path, tmp_path: Path) -> None:
    runner, target = CliRunner(), tmp_path / "target"
    run = runner.invoke(train.app, ["lm", "--out", str(target), "--data", str(corpus_folder), *SMALL, "--json"])
    assert run.exit_code == 0, run.output
    measured = json.loads(run.stdout)
    assert measured["steps"] == 4
    assert measured["tokens"] == 4 * 2 * 32
    assert measured["overlap"] is None

    distil = ["lm", "--out", str(tmp_path / "draft"), "--distill-from", str(target), "--data", str(corpus_folder)]
    run = runner.invoke(train.app, [*distil, *SMALL])
    assert run.exit_code == 0, run.output
    assert "sum min(p, q) with the target" in run.stderr
    assert (tmp_path / "draft/model.safetensors").is_file()

    run = runner.invoke(train.app, [*distil, *SMALL])
    assert isinstance(run.exception, ConfigError)
    assert "--resume" in str(run.exception)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no folder to write to"),
        (["--out", "x"], "needs an end"),
        (["--out", "x", "--layers", "0"], "--layers is 0"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_read(arguments: list[str], reason: str) -> None:
    run = CliRunner().invoke(train.app, ["lm", *arguments])
    assert isinstance(run.exception, ConfigError)
    assert reason in str(run.exception)
