"""The command as a user starts it: help, version, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from speculant import __version__
from speculant.cli import all_commands, app
from speculant.cli.main import main
from tests.models import Checkpoints

COMMANDS = {name: summary for name, (_, summary) in all_commands().items()}
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


def _help(*arguments: str, width: int = 200) -> str:
    """Return the --help text of a command, which runs in this process."""
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert result.exit_code == 0
    return result.stdout


class Command:
    """The command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def fails(self, *arguments: str, code: int = 2) -> str:
        """Run a command that must fail and print nothing on stdout; return its stderr."""
        self._monkeypatch.setattr(sys, "argv", ["speculant", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert (ended.value.code, out) == (code, "")
        assert "Traceback" not in err
        return err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.delenv("SPECULANT_MODEL", raising=False)
    return Command(monkeypatch, capsys)


def _shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, env=os.environ | env)


def test_version() -> None:
    assert _speculant("--version").stdout == f"speculant {__version__}\n"


def test_help_lists_every_command() -> None:
    result = _speculant("--help")
    assert result.returncode == 0
    assert {"generate", "serve", "bench", "train"} < COMMANDS.keys(), "the laboratory's are found by an entry point"
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_their_summaries(name: str) -> None:
    found = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    assert " ".join(found.help.partition("\n\n")[0].split()) == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    shown = _help(name)
    assert "Examples:" in shown
    assert f"speculant {name}" in shown


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("group", [(), ("bench",), ("train",)])
def test_help_cuts_no_summary(group: tuple[str, ...], width: int) -> None:
    commands = _help(*group, width=width).partition("Commands:")[2].partition("Examples:")[0]
    assert len(commands.split()) > 20
    assert "..." not in commands
    assert "\u2026" not in commands


@pytest.mark.parametrize("width", [60, 80])
def test_help_has_every_option_and_default_in_full(width: int) -> None:
    wide, narrow = (_help("generate", width=columns) for columns in (400, width))
    assert "".join(narrow.split()) == "".join(wide.split())


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom speculant.cli.main import app\n"
        "for command in ('generate', 'bench', 'check-lossless', 'check-pair', 'train', 'train head'):\n"
        "    app([*command.split(), '--help'], standalone_mode=False)\nassert 'torch' not in sys.modules"
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
def test_a_mistake_is_explained_without_a_traceback(
    command: Command, arguments: list[str], problem: str, fix: str
) -> None:
    shown = command.fails("generate", *arguments)
    assert shown.startswith("error: ")
    assert problem in shown
    assert fix in shown.partition("  fix: ")[2]


def test_debugging_shows_the_traceback() -> None:
    result = _speculant("generate", "hello", SPECULANT_DEBUG="1")
    assert "Traceback" in result.stderr
    assert "ConfigError" in result.stderr


def test_a_full_cache_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from speculant.cli import main as module
    from speculant.errors import CapacityError

    def fail() -> None:
        raise CapacityError("the cache is full", "raise kv_memory.")

    monkeypatch.setattr(module, "app", fail)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "error: the cache is full\n  fix: raise kv_memory.\n"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("generate hello --model {} --max-tokens 100 --ignore-eos", marks=pytest.mark.slow),
        "plan --alpha 0.8 --cost-ratio 0.1",
    ],
)
def test_a_closed_pipe_is_no_error(checkpoints: Checkpoints, arguments: str) -> None:
    command = f"{_COMMAND} {arguments.format(checkpoints.target)} | head -c 1"
    result = subprocess.run(["bash", "-c", command], check=False, capture_output=True)
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    "closed", [">&-", *(pytest.param(each, marks=pytest.mark.slow) for each in ("<&-", "2>&-")), "<&- >&- 2>&-"]
)
@pytest.mark.parametrize(
    "arguments",
    [
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("generate - {}", "generate hello --json {}", "chat {}")
        ),
        "plan --alpha 0.8 --cost-ratio 0.1",
    ],
)
def test_a_closed_stream_is_no_error(closed: str, arguments: str) -> None:
    model = "--model demo --max-tokens 4"
    result = _shell(f"printf hello | {{ {_COMMAND} {arguments.format(model)} {closed}; }}")
    assert "Traceback" not in result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    ["--version", "plan --alpha 0.8 --cost-ratio 0.1 --json", pytest.param("demo --help", marks=pytest.mark.slow)],
)
def test_a_full_disk_is_explained(arguments: str) -> None:
    result = _shell(f"{_COMMAND} {arguments} >/dev/full")
    assert result.returncode == 1
    assert "error: the system refused" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


def test_a_folder_that_cannot_be_made_is_explained(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = command.fails("train", "lm", "--out", "/proc/nothing", "--steps", "1")
    assert shown.startswith("error: /proc/nothing can't be made")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    assert "set XDG_CACHE_HOME" in command.fails("demo", "--shape", "1b")


def test_a_fault_of_ours_has_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from speculant.cli import main as module

    def fail() -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(module, "app", fail)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: Speculant failed: KeyError: 'a fault'")
    assert "SPECULANT_DEBUG=1" in error


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("command", ["generate \u65e5\u672c --model {} --json", "demo"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_the_characters_is_no_error(checkpoints: Checkpoints, encoding: str, command: str) -> None:
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": encoding}
    result = _speculant(*command.format(checkpoints.target).split(), "--max-tokens", "4", **locale)
    assert result.returncode == 0
    if "--json" in command:
        assert json.loads(result.stdout)["usage"]["completion_tokens"] == 4


def test_an_error_is_shown_in_a_locale_without_its_characters() -> None:
    """As an output would be, but before a model is loaded."""
    result = _speculant("generate", "a", "--model", "\u65e5\u672c", LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_prompt_that_is_not_text_is_explained(checkpoints: Checkpoints) -> None:
    result = _shell(f"printf '\\377' | {_COMMAND} generate - --model {checkpoints.target}", LC_ALL="C")
    assert result.returncode == 2
    assert result.stderr.startswith("error: the prompt is not valid text")
