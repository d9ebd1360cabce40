"""What a terminal gets: no text controls it, wherever it comes from."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from rich.table import Table

import speculant.cli
import speculant.lab.cli
from speculant.cli import messages, print_json, results, show_error
from speculant.errors import SpeculantError

HOSTILE = "a\x1b]0;title\x07b\n\tc\x9b2J\r:smile:[bold]d\x7f"
HARMLESS = "a]0;titleb\n\tc2J:smile:[bold]d"


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what an output shows of the hostile text."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    if request.param:
        monkeypatch.setenv("FORCE_COLOR", "1")
    return HARMLESS if request.param else HOSTILE


def test_written_text_is_verbatim_but_for_control_characters(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    results().write(HOSTILE)
    messages().write(HOSTILE)
    assert capsys.readouterr() == (shown, shown)


def test_printed_text_tables_and_errors_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    for console in (results(), messages()):
        console.print(HOSTILE)
        console.print(table)
    show_error(SpeculantError(HOSTILE, HOSTILE))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert text.count("]0;titleb") == (6 if text is err else 4)
        assert not {"\x07", "\x9b", "\r", "\x7f"} & {*text}
        assert "\x1b]" not in text, "the only sequences are those of styles"
        assert ":smile:[bold]" in text, "nor is it replaced"


def test_json_escapes_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({HOSTILE: [HOSTILE]})
    out = capsys.readouterr().out
    assert json.loads(out) == {HOSTILE: [HOSTILE]}
    assert not {chr(each) for each in (*range(10), *range(11, 32), *range(127, 160))} & {*out}


def test_commands_print_through_these_consoles_alone() -> None:
    """Another way to print would let a text through."""
    found = []
    folders = [Path(package.__path__[0]) for package in (speculant.cli, speculant.lab.cli)]
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write"):
                found.append(path.name)
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "Console"
                and "quiet=True" not in ast.unparse(node)
            ):
                found.append(path.name)
    assert found == ["terminal.py"], "print_json"
