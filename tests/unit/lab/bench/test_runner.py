"""The runner of benchmarks/: command lines, files of results, and the documented commands."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculant.lab.bench import Benchmark, ratio, timed

ROOT = Path(__file__).parents[4]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "revision_worker")
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")]
RESULTS = [path for path in (ROOT / "benchmarks" / "results").glob("*.json") if not path.name.startswith("peers")]
COMMANDS = [
    command
    for path in PAGES
    for command in re.findall(
        r"^(?:`|\$ )?(python benchmarks/[^`#\n]*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
]


def benchmark_of(script: str) -> Benchmark:
    found = importlib.import_module(f"benchmarks.{script}").BENCHMARK
    assert isinstance(found, Benchmark)
    return found


def make(folder: Path, measure: Any, **options: Any) -> Benchmark:
    (folder / "results").mkdir(exist_ok=True)
    return Benchmark(str(folder / "made.py"), "About.", "Nothing.", measure, rounds=5, options=options)


def run(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [benchmark.script, *words])
    benchmark.main()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_a_command_line_and_a_prediction(script: str) -> None:
    benchmark = benchmark_of(script)
    positions = [name for name, option in benchmark.options.items() if isinstance(option, type)]
    assert benchmark.parse(["." for _ in positions]).name == script
    assert benchmark.predicted
    assert benchmark.about


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_is_read(command: str) -> None:
    script, *words = shlex.split(command.replace("[", "").replace("]", ""))[1:]
    benchmark_of(Path(script).stem).parse(words)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_command_of_a_result_is_read(path: Path) -> None:
    """The script that wrote a kept result still exists and reads the same command line."""
    report = json.loads(path.read_text(encoding="utf-8"))
    script, *words = shlex.split(report["command"])[1:]
    assert Path(script).stem in path.stem
    benchmark_of(Path(script).stem).parse(words)
    assert {"date", "revision", "versions", "machine", "predicted", "seen"} <= set(report)


def test_models_of_real_text_are_paths_or_known_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.import_module("benchmarks.real_text").place_of
    monkeypatch.setenv("SPECULANT_REAL_MODELS", str(tmp_path))
    assert find(str(tmp_path)) == tmp_path
    with pytest.raises(SystemExit, match=r"gemma.*gguf is not there; `make real-models`"):
        find("gemma3")
    with pytest.raises(SystemExit, match="name a folder, a GGUF file, or one of smollm2"):
        find("gemma4")


def test_figures_are_written_each_time_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
        yield {"first": arguments.rounds}
        assert json.loads((tmp_path / "results" / "made.json").read_text())["seen"] == {"first": 7}
        raise KeyError("a later failure")

    with pytest.raises(KeyError):
        run(make(tmp_path, measure), monkeypatch, "--rounds", "7")
    report = json.loads((tmp_path / "results" / "made.json").read_text())
    assert report["command"] == "python benchmarks/made.py --rounds 7"
    assert report["predicted"] == "Nothing."
    assert {"processor", "threads"} == set(report["machine"])


def test_a_measurement_may_write_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for name in arguments.names:
            arguments.name = name
            yield {"of": name}

    run(make(tmp_path, measure, names=["a", "b"]), monkeypatch)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"a.json", "b.json"}
    assert '"of": "a"' in (printed := capsys.readouterr().out)
    assert '"of": "b"' in printed


def test_quick_runs_one_round_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
        yield {"rounds": arguments.rounds}

    run(make(tmp_path, measure), monkeypatch, "--quick")
    assert '"rounds": 1' in capsys.readouterr().out
    assert not list((tmp_path / "results").iterdir())


def test_options_have_the_types_of_their_defaults(tmp_path: Path) -> None:
    options = {"other": Path, "draft_model": "demo", "share": 0.5, "sizes": [1, 2], "all": False}
    found = make(tmp_path, None, **options).parse(
        ["here", "--share", "1", "--sizes", "3", "--draft-model", "x", "--all"]
    )
    assert (found.other, found.share, found.sizes, found.draft_model, found.all) == (Path("here"), 1.0, [3], "x", True)
    assert make(tmp_path, None, **options).parse(["."]).sizes == [1, 2]


def test_every_subject_is_timed_in_every_round() -> None:
    calls = list[str]()
    times = timed({name: lambda name=name: calls.append(name) for name in "ab"}, 3)  # type: ignore[misc]
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(own) for name, own in times.items()} == {"a": 3, "b": 3}
    assert ratio({"a": [2.0, 6.0], "b": [1.0, 2.0]}, "a", "b") == {"q1": 2.25, "median": 2.5, "q3": 2.75}
