"""Every example runs as it is, says something, and is short enough to be read at a glance."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parent)  # as Python does for a script: two of them have entry points there
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
