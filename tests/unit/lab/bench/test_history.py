"""The history: the fields of an entry, and the changes that are more than noise."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from speculant import __version__
from speculant.errors import ConfigError
from speculant.lab.bench import (
    Change,
    HistoryEntry,
    Spread,
    append,
    command_of,
    compare_entries,
    entry_of,
    history,
    read,
    typical,
)

MACHINE = {"processor": "a", "threads": 2}
DOCUMENT = {
    "cases": [
        {
            "prompt_tokens": {"median": 64},
            "ratios": {
                "speculative/plain": {
                    "tokens_per_s": {"q1": 1.5, "median": 2.0, "q3": 2.5},
                    "itl_mean_s": {"q1": 0.4, "median": 0.5, "q3": 0.8},
                    "steps": {"q1": 0.5, "median": 0.5, "q3": 0.5},
                }
            },
        }
    ]
}


def an_entry(median: float, spread: float = 0.05, **other: str) -> HistoryEntry:
    figure = Spread(median - spread, median, median + spread)
    return replace(HistoryEntry("2026-01-01", "abc", MACHINE, "speculant bench", {"speed": figure}), **other)


def test_an_entry_has_ratios_of_which_more_is_better() -> None:
    entry = entry_of(DOCUMENT, MACHINE, ["bench", "latency", "--json"])
    assert entry.command == "speculant bench latency"
    assert entry.machine == MACHINE
    assert entry.figures["speculative/plain tokens/s"] == Spread(1.5, 2.0, 2.5)
    turned = entry.figures["speculative/plain speed between tokens"]
    assert (turned.q1, turned.median, turned.q3) == (1.25, 2.0, 2.5)
    assert len(entry.figures) == 2, "the number of steps is no speed"


def test_figures_of_several_cases_have_names_of_their_own() -> None:
    case = DOCUMENT["cases"][0]
    longer = {**case, "prompt_tokens": {"median": 512}}
    names = entry_of({"cases": [case, longer]}, MACHINE, []).figures
    assert {name.partition(":")[0] for name in names} == {"prompts of 64", "prompts of 512"}
    names = entry_of({"cases": [{**case, "batch": 1}, {**case, "batch": 4}]}, MACHINE, []).figures
    assert {name.partition(":")[0] for name in names} == {"batch 1", "batch 4"}


def test_a_server_has_figures_of_its_capacity_and_loads() -> None:
    ratio = {"speculative/plain": {"requests_per_s": {"q1": 1.0, "median": 1.5, "q3": 2.0}}}
    value = {"capacity": {"ratios": ratio}, "loads": [{"load": 0.5, "ratios": ratio}, {"load": 2.0, "ratios": {}}]}
    found = entry_of(value, MACHINE, []).figures
    assert set(found) == {"speculative/plain requests/s", "load 0.5: speculative/plain requests/s"}


def test_flags_that_change_no_figure_are_left_out() -> None:
    given = ["bench", "latency", "--report", "a b.html", "--json", "--prompts", "x y", "--history=h", "--trace", "t"]
    assert command_of([*given, "--rounds", "3"]) == "speculant bench latency --prompts 'x y' --rounds 3"


def test_appended_entries_are_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for _ in range(2):
        append(path, DOCUMENT, MACHINE)
    first, second = read(path)
    assert replace(first, date=second.date) == second
    assert first.figures["speculative/plain tokens/s"] == Spread(1.5, 2.0, 2.5)
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("median", [0.5, 1.0, 2.0])
def test_slower_and_faster_are_beyond_the_spread(median: float) -> None:
    entries = [an_entry(1.0), an_entry(1.04), an_entry(0.97), an_entry(median)]
    [found] = compare_entries(entries)
    assert (found.num_earlier, found.entry) == (3, entries[-1])
    [change] = found.changes
    assert change.verdict == {0.5: "slower", 1.0: "unchanged", 2.0: "faster"}[median]
    assert change.ratio == pytest.approx(median)


def test_overlapping_quartiles_are_no_change() -> None:
    before = Spread(0.9, 1.0, 1.1)
    assert Change("speed", Spread(0.7, 0.8, 0.91), before).verdict == "unchanged"
    assert Change("speed", Spread(0.7, 0.8, 0.89), before).verdict == "slower"
    assert Change("speed", Spread(1.11, 1.2, 1.3), before).verdict == "faster"


def test_usual_bounds_cover_runs_that_differ() -> None:
    assert typical([Spread(0.9, 1.0, 1.1)]) == Spread(0.9, 1.0, 1.1)
    apart = [Spread(median, median, median) for median in (1.0, 1.2, 1.4, 1.6, 1.8)]
    assert typical(apart) == Spread(1.2, 1.4, 1.6)
    once_disturbed = [Spread(0.9, 1.0, 1.1)] * 4 + [Spread(0.1, 0.2, 3.0)]
    assert typical(once_disturbed) == Spread(0.9, 1.0, 1.1)


def test_other_commands_and_machines_are_not_compared() -> None:
    others = [an_entry(9.0, command="other"), replace(an_entry(9.0), machine={"processor": "b"})]
    found = compare_entries([an_entry(1.0), *others, an_entry(1.0)])
    assert [each.num_earlier for each in found] == [0, 0, 1]
    assert [list(each.changes) for each in found[:2]] == [[], []]
    assert found[2].changes[0].verdict == "unchanged"


def test_a_new_figure_is_not_compared() -> None:
    first = replace(an_entry(1.0), figures={"other": Spread(1, 1, 1)})
    [found] = compare_entries([first, an_entry(1.0)])
    assert (found.num_earlier, list(found.changes)) == (1, [])


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"figures": {"a": 3}}', '{"figures": {"a": {"q1": 1}}}'])
def test_an_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(asdict(an_entry(1.0))) + f"\n{line}\n")
    with pytest.raises(ConfigError, match="jsonl:2 is not an entry"):
        read(path)


def test_a_missing_or_empty_history_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="is empty") as caught:
        read(tmp_path / "empty.jsonl")
    assert "--history" in caught.value.fix


def test_the_revision_is_the_sources_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy of the package inside another repository is not part of that repository."""
    monkeypatch.setattr(history, "__file__", str(tmp_path / "history.py"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert history.revision() == __version__
