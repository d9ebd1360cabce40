"""The commands and programs of the documentation run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.commands import invoke
from tests.gguf_models import convert
from tests.models import Shape, write_checkpoint

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "docs/quickstart.md", "docs/planning.md", "docs/profiling.md", "docs/structured.md")
WITH_COMMANDS = (*DOCUMENTS, "docs/benchmarks.md")
GGUF = "path/model-Q4_K_M.gguf"  # the name of the reader's own file
OTHERS = ("demo", "serve", "chat")  # they have their own tests; the last two do not end by themselves
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINKED = ("README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in PAGES))


def _blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def _commands(document: str) -> list[str]:
    lines = [line for block in _blocks(document, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("speculant ") and line.split()[1] not in OTHERS]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _blocks(document, "python")
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, document, "exec"), scope)


def _case(command: str) -> Any:
    """Return a command as a test case; those that measure are slow."""
    slow = command.startswith(("speculant bench ", "speculant doctor  ")) and "--help" not in command
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [_case(line) for document in WITH_COMMANDS for line in _commands(document)])
def test_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command, comments=True)[1:]
    if GGUF in arguments:
        source = write_checkpoint(tmp_path / "source", Shape(layers=1, hidden_size=256))
        Path(GGUF).parent.mkdir()
        convert(source, Path(GGUF), "Q4_K")
    invoke(*arguments)


@pytest.mark.parametrize("document", LINKED)
def test_links_and_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    linked = [(ROOT / document).parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    sources = re.findall(r"`([a-z_/]+/[a-z_]+\.(?:py|h|json))`", text)
    missing = [name for name in sources if not any((base / name).exists() for base in (ROOT, ROOT / "src/speculant"))]
    assert [str(path) for path in linked if not path.exists()] + missing == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
