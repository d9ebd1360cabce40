"""`--log-level`, and the library's log: without the flag nothing is shown."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from speculant.cli.flags import LogLevel
from speculant.cli.main import app
from tests.models import Checkpoints

COMMANDS = (["generate"], ["demo"], ["doctor"], ["check-lossless"], ["bench", "throughput"], ["train", "lm"])


def _stderr(checkpoints: Checkpoints, *arguments: str) -> str:
    models = ("--model", checkpoints.target, "--draft-model", checkpoints.near, "--dtype", "float64")
    result = subprocess.run(
        [sys.executable, "-m", "speculant.cli.main", "generate", "hello", *models, "--max-tokens", "4", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_log_level_is_a_flag_of_every_command(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], catch_exceptions=False)
    assert "--log-level" in result.stdout
    assert all(level in result.stdout for level in LogLevel)


def test_log_level_shows_what_was_loaded(checkpoints: Checkpoints) -> None:
    shown = _stderr(checkpoints, "--log-level", "info")
    assert "INFO speculant.models.weights.load: target " in shown
    assert "INFO speculant.models.weights.load: draft " in shown
    assert "INFO speculant.engine.memory: paged cache: " in shown
    assert "INFO speculant.engine.build: speculation is on: fallback, adaptive length" in shown


def test_without_a_log_level_nothing_is_logged(checkpoints: Checkpoints) -> None:
    shown = _stderr(checkpoints)
    assert "INFO" not in shown
    lines = [line for line in shown.splitlines() if not line.startswith("Loading")]  # progress, on a busy machine
    assert len(lines) == 1, "the line of figures"


def test_an_unknown_log_level_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--log-level", "loud"])
    assert result.exit_code == 2
    assert "loud" in result.output


def test_library_installs_no_handler() -> None:
    code = (
        "import speculant.engine.llm, logging; assert not logging.root.handlers; "
        "assert not [n for n in logging.root.manager.loggerDict if n.startswith('speculant') "
        "and logging.getLogger(n).handlers]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert logging.getLogger("speculant").level == logging.NOTSET
