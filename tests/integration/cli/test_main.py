"""The command as a user starts it: help, version, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer.main

from speculant import __version__
from speculant.cli.main import COMMANDS, app
from tests.models import Checkpoints

_COMMAND = f"{sys.executable} -m speculant.cli.main"


def _speculant(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPECULANT_")}
    return subprocess.run(
        [sys.executable, "-m", "speculant.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=clean | {"COLUMNS": "200", "NO_COLOR": "1"} | env,
    )


def _shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, env=os.environ | env)


def test_version() -> None:
    assert _speculant("--version").stdout == f"speculant {__version__}\n"


def test_help_lists_every_command() -> None:
    result = _speculant("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_has_their_summaries(command: str) -> None:
    found = typer.main.get_command(app).get_command(None, command)  # type: ignore[attr-defined]
    assert " ".join(found.help.partition("\n\n")[0].split()) == COMMANDS[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    result = _speculant(command, "--help")
    assert result.returncode == 0
    assert "Examples:" in result.stdout
    assert f"speculant {command}" in result.stdout


@pytest.mark.parametrize("width", ["60", "80"])
@pytest.mark.parametrize("group", [(), ("bench",), ("train",)])
def test_help_shows_whole_summaries(group: tuple[str, ...], width: str) -> None:
    result = _speculant(*group, "--help", COLUMNS=width)
    commands = result.stdout.partition("Commands:")[2].partition("Examples:")[0]
    assert len(commands.split()) > 20
    assert "..." not in commands
    assert "\u2026" not in commands


@pytest.mark.parametrize("width", ["60", "80"])
def test_help_has_every_option_and_default_in_full(width: str) -> None:
    wide, narrow = (_speculant("generate", "--help", COLUMNS=columns).stdout for columns in ("400", width))
    assert "".join(narrow.split()) == "".join(wide.split())


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


def test_an_exceeded_capacity_is_a_runtime_error(
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


def test_a_closed_pipe_is_no_error(checkpoints: Checkpoints) -> None:
    arguments = f"generate hello --model {checkpoints.target} --max-tokens 100 --ignore-eos"
    command = f"{sys.executable} -m speculant.cli.main {arguments} | head -c 1"
    result = subprocess.run(["bash", "-c", command], check=False, capture_output=True)
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "arguments", ["generate - {}", "generate hello --json {}", "chat {}", "plan --alpha 0.8 --cost-ratio 0.1"]
)
def test_a_closed_stream_is_no_error(closed: str, arguments: str) -> None:
    model = "--model demo --max-tokens 4"
    result = _shell(f"printf hello | {{ {_COMMAND} {arguments.format(model)} {closed}; }}")
    assert "Traceback" not in result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize("arguments", ["--version", "plan --alpha 0.8 --cost-ratio 0.1 --json", "demo --help"])
def test_a_full_disk_is_explained(arguments: str) -> None:
    result = _shell(f"{_COMMAND} {arguments} >/dev/full")
    assert result.returncode == 1
    assert "error: the system refused" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


def test_a_folder_that_cannot_be_made_is_explained() -> None:
    result = _speculant("train", "lm", "--out", "/proc/nothing", "--steps", "1")
    assert result.returncode == 2
    assert result.stderr.startswith("error: /proc/nothing can't be made")
    result = _speculant("demo", "--shape", "1b", XDG_CACHE_HOME="/proc/nothing")
    assert result.returncode == 2
    assert "set XDG_CACHE_HOME" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_internal_error_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from speculant.cli import main as command

    def fail() -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: Speculant failed: KeyError: 'a fault'")
    assert "SPECULANT_DEBUG=1" in error


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_the_characters_is_no_error(checkpoints: Checkpoints, encoding: str) -> None:
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": encoding}
    result = _speculant(
        "generate", "\u65e5\u672c", "--model", checkpoints.target, "--max-tokens", "4", "--json", **locale
    )
    assert result.returncode == 0
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 4
    assert _speculant("demo", "--max-tokens", "4", **locale).returncode == 0


def test_a_prompt_that_is_not_text_is_explained(checkpoints: Checkpoints) -> None:
    result = _shell(f"printf '\\377' | {_COMMAND} generate - --model {checkpoints.target}", LC_ALL="C")
    assert result.returncode == 2
    assert result.stderr.startswith("error: the prompt is not valid text")
