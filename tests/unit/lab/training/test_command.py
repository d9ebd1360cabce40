"""`speculant train lm` on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculant.errors import ConfigError
from speculant.lab.cli import train
from speculant.lab.cli.progress import _line
from speculant.lab.training import LanguageRun, TrainingConfig, TrainingReport
from tests.unit.lab.training.runs import prepare

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


def test_the_time_left_is_shown_from_the_second_step_on(config: TrainingConfig) -> None:
    _, trainer = prepare(LanguageRun(config))
    for progress, shown in ((0.0, False), (0.25, True)):
        line = _line(trainer, TrainingReport(1, 9.0, progress, 1000.0, 30.0))
        assert ("2 min left" in line) == shown
        assert ("min left" in line) == shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no folder to write to"),
        (["--out", "x"], "needs an end"),
        (["--out", "x", "--layers", "0"], "--layers is 0"),
        (["--out", "x", "--minutes", "nan"], "--minutes is nan"),
        (["--out", "x", "--minutes", "inf"], "--minutes is inf"),
        (["--out", "x", "--save-minutes", "nan"], "--save-minutes is nan"),
        (["--out", "x", "--matrix-lr", "nan"], "--matrix-lr is nan"),
        (["--out", "x", "--embedding-lr", "inf"], "--embedding-lr is inf"),
        (["--out", "x", "--seed", "-1"], "--seed is -1"),
        (["--out", "x", "--seed", str(2**64)], f"--seed is {2**64}"),
        (["--out", "x", "--vocab-size", str(10**12)], f"--vocab-size is {10**12}"),
        (["--out", "x", "--layers", str(10**9)], f"--layers is {10**9}"),
        (["--out", "x", "--steps", str(10**30)], f"--steps is {10**30}"),
        (["--out", "x", "--hidden", "65536"], "about 1e+11 weights"),
        (["--out", "x", "--batch", "1000000"], "logits in a step"),
    ],
)
def test_missing_settings_are_reported_before_files_are_read(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(train.app, ["lm", *arguments])
    assert isinstance(run.exception, ConfigError)
    assert reason in str(run.exception)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_seed_in_the_range_draws_weights_and_windows(seed: int, config: TrainingConfig) -> None:
    _, trainer = prepare(LanguageRun(replace(config, seed=seed)))
    assert trainer.windows.batch(0, 2).shape == (2, 1 + config.seq)


@pytest.mark.parametrize("change", [{"seed": "1"}, {"batch": 2.0}, {"layers": True}, {"seq": None}], ids=str)
def test_a_number_of_another_kind_is_refused(change: dict[str, Any], config: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(change))} is"):
        replace(config, **change)
