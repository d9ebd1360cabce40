"""`--log-level`, and the library's log: by default nothing is shown."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from speculant.cli import LogLevel
from tests.commands import invoke
from tests.models import Checkpoints

COMMANDS = (["generate"], ["demo"], ["doctor"], ["check-lossless"], ["bench", "throughput"], ["train", "lm"])


def _arguments(checkpoints: Checkpoints) -> list[str]:
    models = ["--model", checkpoints.target, "--draft-model", checkpoints.near, "--dtype", "float64"]
    return ["generate", "hello", *models, "--max-tokens", "4"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_log_level_is_a_flag_of_every_command(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert "--log-level" in result.stdout
    assert all(level in result.stdout for level in LogLevel)


@pytest.mark.slow
def test_log_level_shows_what_was_loaded(checkpoints: Checkpoints) -> None:
    command = [sys.executable, "-m", "speculant.cli.main", *_arguments(checkpoints), "--log-level", "info"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "INFO speculant.models.weights.load: target " in shown
    assert "INFO speculant.models.weights.load: draft " in shown
    assert "INFO speculant.engine.memory: paged cache: " in shown
    assert (
        "INFO speculant.engine.build: speculation is on: suffix, prompt_lookup, draft_model (method fallback)" in shown
    )


def test_log_level_lets_records_of_loading_through(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    """In this process, whose handlers are pytest's."""
    logger = logging.getLogger("speculant")
    before = (logger.level, [*logger.handlers])
    assert before == (logging.NOTSET, []), "the library sets neither"
    try:
        invoke(*_arguments(checkpoints), "--log-level", "info")
    finally:
        logger.setLevel(logging.NOTSET)
    shown = {(name, text.split()[0]) for name, level, text in caplog.record_tuples if level == logging.INFO}
    loads = {("speculant.models.weights.load", "target"), ("speculant.models.weights.load", "draft")}
    assert shown >= {*loads, ("speculant.engine.memory", "paged"), ("speculant.engine.build", "speculation")}


def test_log_level_left_out_shows_nothing(checkpoints: Checkpoints) -> None:
    shown = invoke(*_arguments(checkpoints)).stderr
    assert "INFO" not in shown
    lines = [line for line in shown.splitlines() if not line.startswith("Loading")]  # progress, on a busy machine
    assert len(lines) == 1, "the line of figures"


def test_an_unknown_log_level_is_refused() -> None:
    assert "loud" in invoke("doctor", "--log-level", "loud", code=2).output


@pytest.mark.slow
def test_library_installs_no_handler() -> None:
    code = (
        "import speculant.engine.llm, logging; assert not logging.root.handlers; "
        "assert not [n for n in logging.root.manager.loggerDict if n.startswith('speculant') "
        "and logging.getLogger(n).handlers]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert logging.getLogger("speculant").level == logging.NOTSET
