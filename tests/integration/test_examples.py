"""Every example runs as it is, prints something, and has at most 40 lines."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculant import AsyncEngine
from tests.servers import LiveServer

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Return a server of the embedded pair, for the examples that are clients."""
    server = LiveServer(AsyncEngine("demo", draft_model="demo")).ready()
    yield server
    server.stop()


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    if "OPENAI_BASE_URL" in text:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{request.getfixturevalue('server').url}/v1")
    monkeypatch.syspath_prepend(path.parent)  # as Python does for a script: two of them have entry points there
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
