"""The command as a user starts it: help, version, errors, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from speculant import __version__
from tests.models import Checkpoints

COMMANDS = ("generate", "chat", "demo", "doctor", "check-lossless", "check-pair", "plan", "train")


def _speculant(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPECULANT_")}
    return subprocess.run(
        [sys.executable, "-m", "speculant.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=clean | {"COLUMNS": "200", "NO_COLOR": "1"} | env,
    )


def test_version() -> None:
    assert _speculant("--version").stdout == f"speculant {__version__}\n"


def test_help_lists_every_command() -> None:
    result = _speculant("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    result = _speculant(command, "--help")
    assert result.returncode == 0
    assert "Examples:" in result.stdout
    assert f"speculant {command}" in result.stdout


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom speculant.cli.main import app\n"
        "app(['generate', '--help'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (["hello"], "no model was given", "--model demo --draft-model demo"),
        (["--model", "demo"], "there is no prompt", "--prompt-file"),
        (["hello", "--model", "/nowhere"], "/nowhere", "path"),
        (["hello", "--model", "demo", "--temperature=-1"], "temperature=-1.0", "within that range"),
        (["hello", "--model", "demo", "--dtype", "float31"], "float31", "did you mean 'float32'"),
        (["hello", "--model", "demo", "--speculative-config", "methd"], "--speculative-config", "key=value"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(arguments: list[str], problem: str, fix: str) -> None:
    result = _speculant("generate", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr
    assert fix in result.stderr.partition("  fix: ")[2]
    assert "Traceback" not in result.stderr


def test_debugging_shows_the_traceback() -> None:
    result = _speculant("generate", "hello", SPECULANT_DEBUG="1")
    assert "Traceback" in result.stderr
    assert "ConfigError" in result.stderr


def test_what_does_not_fit_is_a_runtime_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from speculant.cli import main as command
    from speculant.errors import CapacityError

    def fail() -> None:
        raise CapacityError("the cache is full", "raise kv_memory.")

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "error: the cache is full\n  fix: raise kv_memory.\n"


def test_a_reader_that_goes_away_is_no_error(checkpoints: Checkpoints) -> None:
    arguments = f"generate hello --model {checkpoints.target} --max-tokens 100 --ignore-eos"
    command = f"{sys.executable} -m speculant.cli.main {arguments} | head -c 1"
    result = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
