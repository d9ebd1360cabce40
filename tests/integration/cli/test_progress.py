"""Long commands print a first line soon and each result at once, and only JSON on stdout."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from speculant.cli import Parts, app, counted_progress, progress, terminal
from speculant.lab.cli import progress_of_runs
from tests.models import Checkpoints

CHECK = ("check-lossless", "--cases", "12", "--texts", "16", "--max-tokens", "32")
COMPARE = ("bench", "compare", "demo", "--draft-model", "demo", "--method", "ngram", "--rounds", "2")


@dataclass(frozen=True)
class Line:
    """A line of a command's output, and its time."""

    stream: str
    text: str
    seconds: float


def run_here(*arguments: str) -> list[Line]:
    """Run a command in this process, whose output is a buffer as of a pipe; return the lines of its results."""
    started, lines = time.monotonic(), list[Line]()

    class Pipe(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            now = time.monotonic() - started
            lines.extend(Line("out", text, now) for text in bytes(data).decode().splitlines())
            return len(data)

    with pytest.MonkeyPatch.context() as patch, io.TextIOWrapper(io.BufferedWriter(Pipe()), "utf-8") as out:
        patch.setattr(sys, "stdout", out)
        app([*arguments], standalone_mode=False)
        out.flush()
    return lines


def run(*arguments: str) -> list[Line]:
    """Run a command to its end and return its lines in order."""
    started, lines = time.monotonic(), list[Line]()
    process = subprocess.Popen(
        [sys.executable, "-m", "speculant.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def read(name: str, stream: Iterable[str]) -> None:
        for text in stream:
            lines.append(Line(name, text.rstrip(), time.monotonic() - started))

    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(target=read, args=("out", process.stdout)),
        threading.Thread(target=read, args=("err", process.stderr)),
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert process.wait() == 0
    return lines


def first(lines: list[Line], beginning: str) -> Line:
    return next(line for line in lines if line.text.strip().startswith(beginning))


@pytest.mark.parametrize("pair", ["tiny", pytest.param("embedded", marks=pytest.mark.slow)])
def test_check_lossless_prints_each_result_at_once(checkpoints: Checkpoints, pair: str) -> None:
    tiny = ("--model", checkpoints.target, "--draft-model", checkpoints.near)
    lines = run_here(*CHECK, *tiny) if pair == "tiny" else run(*CHECK)
    results = [line for line in lines if line.stream == "out"]
    settings, proof = first(results, "speculation is on"), first(results, "block, for sampled")
    tests, texts, verdict = first(results, "favourite"), first(results, "greedy, plain"), first(results, "lossless")
    assert settings.seconds < proof.seconds < tests.seconds < texts.seconds < verdict.seconds
    assert proof.seconds < verdict.seconds / 2 + settings.seconds, "the first proof doesn't wait for the tests"


@pytest.mark.slow  # test_bench_compare.py looks for the line
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_bench_compare_shows_medians_after_the_first_round(as_json: tuple[str, ...]) -> None:
    lines = run(*COMPARE, *as_json)
    shown = [line for line in lines if line.stream == "err"]
    interim, result = first(shown, "after 1 of 2 rounds: plain "), next(line for line in lines if line.stream == "out")
    assert "ngram" in interim.text
    assert "times its speed" in interim.text
    assert interim.seconds < result.seconds
    assert first(shown, "Warming up").seconds < interim.seconds
    if as_json:
        assert json.loads("\n".join(line.text for line in lines if line.stream == "out"))["cases"]


def test_progress_without_a_terminal_is_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SOON_S", 0.05)
    monkeypatch.setattr(terminal, "PAUSE_S", 0.2)
    with progress("Loading"):
        time.sleep(0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 3
    assert all(line.startswith("Loading (") for line in err.splitlines())


def test_quick_work_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Loading"):
        pass
    assert capsys.readouterr().err == ""


def test_many_short_parts_print_a_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "SOON_S", 0.05)
    parts = Parts()
    for number in range(50):
        parts.begin(f"Part {number}")
        time.sleep(0.01)
    parts.end()
    assert capsys.readouterr().err.startswith("Part ")


def test_interim_results_come_at_once_and_then_rarely(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of_runs(4) as runs:
        for number in range(4):
            runs.begin("plain")
            runs.show(f"after {number}")
    assert capsys.readouterr().err.splitlines() == ["Warming up", "after 0"]


def test_counts_come_soon_and_then_rarely(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "SOON_S", 0.0)
    with counted_progress("Answering", 1000) as show:
        for done in range(500, 1000):
            show(done, 500, lambda seconds: f"{seconds >= 0}")
    assert capsys.readouterr().err.splitlines() == ["Answering: 500 of 1,000 lines, True"]
