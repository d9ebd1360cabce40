"""`speculant bench --report` and `--trace`, as they are typed, with tiny random models."""

from __future__ import annotations

import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import Result

from speculant.engine import PHASES
from speculant.errors import ConfigError
from tests.commands import error_of, invoke
from tests.models import EXACT_DTYPE, Checkpoints

SMALL = ("--num-prompts", "2", "--max-tokens", "24", "--rounds", "2", "--dtype", EXACT_DTYPE)
CHARTS = ("Speed", "Acceptance per position", "Accepted tokens per draft", "Predicted and measured", "Steps of a run")
KINDS = {"accepted", "rejected", "corrected", "plain"}


class Page(HTMLParser):
    """The parts of a page: open tags, outgoing links, and the text of tokens by their origin."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.outside: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self._kind = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.outside += [str(given[name]) for name in ("src", "href", "xlink:href") if name in given]
        self._kind = str(given.get("class", "")) if tag == "span" else ""
        if tag not in ("meta", "br", "path", "use"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._kind = ""
        if tag in self.stack:
            while self.stack.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._kind in KINDS and "pre" in self.stack:
            self.tokens.append((self._kind, data))


def _bench(checkpoints: Checkpoints, *arguments: str) -> Result:
    models = ("--model", checkpoints.target, "--draft-model", checkpoints.near, "--spec-length", "4")
    return invoke("bench", *arguments, *models, *SMALL)


@pytest.fixture(scope="module")
def has_charts() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("has_charts")
@pytest.mark.parametrize("benchmark", ["latency", pytest.param("throughput", marks=pytest.mark.slow)])
def test_report_is_one_file_with_everything(checkpoints: Checkpoints, tmp_path: Path, benchmark: str) -> None:
    path = tmp_path / "report.html"
    result = _bench(checkpoints, benchmark, "--report", str(path))
    assert f"written: {path}" in result.stderr
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert [link for link in page.outside if not link.startswith("#")] == [], "it needs no network"
    assert page.stack == []
    assert text.count("<svg") == len(CHARTS)
    assert all(title in text for title in CHARTS)
    assert {kind for kind, _ in page.tokens} >= {"accepted", "rejected", "corrected"}
    for (kind, _), (following, _) in itertools.pairwise(page.tokens):
        assert (kind == "rejected") <= (following == "corrected"), "of a chain one token is rejected, then corrected"
    for part in ("To repeat it", "processor", "acceptance rate", "tokens a burst", "Measured with"):
        assert part in text


def test_trace_has_the_phases_of_both_modes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _bench(checkpoints, "latency", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(names) == {"plain", "speculative"}
    for track in names.values():
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == track]
        assert {span["name"] for span in spans} == set(PHASES)
        assert min(span["ts"] for span in spans) == 0
        starts = [span["ts"] for span in spans]
        assert starts == sorted(starts)
        assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-3 for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("option", ["--report", "--trace"])
def test_file_that_cannot_be_written_is_explained(checkpoints: Checkpoints, tmp_path: Path, option: str) -> None:
    for path, problem in ((tmp_path, "is a folder"), (tmp_path / "none" / "file", "does not exist")):
        error = error_of("bench", "latency", "--model", checkpoints.target, option, path)
        assert isinstance(error, ConfigError)
        assert problem in error.problem
        assert option.removeprefix("--") in error.problem


def test_report_without_matplotlib_names_the_command(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "report.html"
    error = error_of("bench", "latency", "--model", "demo", "--report", path)
    assert isinstance(error, ConfigError)
    assert re.search(r"pip install -c constraints.txt .speculant\[bench\].", error.fix)
    assert not path.exists()
