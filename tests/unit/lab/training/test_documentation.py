"""The commands and the code of docs/training.md work."""

from __future__ import annotations

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculant.cli import app
from speculant.lab.cli import BoostedFlags, HeadFlags, Seq2SeqFlags, TrainingFlags
from speculant.lab.training import TrainingConfig, config as configuration

PAGE = (Path(__file__).parents[4] / "docs/training.md").read_text()


@pytest.mark.slow
def test_python_of_the_training_page_runs(
    corpus_folder: Path,
    trained_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is the code of the page, with other text files and with the windows of a small model."""
    monkeypatch.chdir(tmp_path)
    for name in ("target", "draft"):
        shutil.copytree(trained_folder, name)
    monkeypatch.setattr(configuration, "TrainingConfig", partial(TrainingConfig, data=(corpus_folder,), seq=32))
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/training.md", "exec"), {})
    assert re.fullmatch(r"[0-9.]+\nOverlap\(alpha=[01]\.[0-9]+, greedy_agreement=1.0, .*\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", [line for line in PAGE.splitlines() if line.startswith("speculant ")])
def test_commands_of_the_training_page_have_known_flags(command: str) -> None:
    """With --help nothing runs, but an unknown command or flag is an error."""
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--help"])
    assert result.exit_code == 0, result.output


def test_flags_of_the_training_page_exist() -> None:
    flags = {
        f"--{name.replace('_', '-')}"
        for group in (TrainingFlags, BoostedFlags, HeadFlags, Seq2SeqFlags)
        for name in group.names()
    }
    named = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {
        "--model",
        "--continuations",
        "--resume",
        "--size",
        "--draft",
        "--method",
        "--draft-quantization",
    }  # of other commands
    assert named
    assert named <= flags
