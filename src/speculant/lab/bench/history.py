"""The history of benchmarks: a JSON line per run with its ratios, and the figures that became slower.

A machine is faster on some days than on others. Ratios within a run can be compared between days; times can't.
"""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from speculant import __version__
from speculant.errors import ConfigError, Converts
from speculant.lab.bench.measuring import Spread

FIGURES = {  # of a ratio; ratios of times are inverted, so that more is better
    "tokens_per_s": ("tokens/s", False),
    "itl_mean_s": ("speed between tokens", True),
    "ttft_s": ("speed to the first token", True),
    "requests_per_s": ("requests/s", False),
    "e2e_p50_s": ("speed of a request, p50", True),
}
WITH_PATH = ("--report", "--trace", "--profile", "--history", "--log-level")  # flags that change no figure
ALONE = ("--json",)


@dataclass(frozen=True)
class HistoryEntry:
    """A run of a benchmark. figures: ratios by name; more is better."""

    date: str
    revision: str
    machine: Mapping[str, Any]
    command: str
    figures: Mapping[str, Spread]

    @property
    def key(self) -> tuple[str, str]:
        """The properties that compared entries share."""
        return self.command, json.dumps(self.machine, sort_keys=True)


@dataclass(frozen=True)
class Change:
    """A figure of the newest run of a command, and of the earlier runs.

    before: the median over the earlier runs, with the usual bounds around it: the quartiles of a typical run, or those
    of the runs' medians if they are further apart.
    """

    figure: str
    now: Spread
    before: Spread

    @property
    def ratio(self) -> float:
        """The figure over the earlier one."""
        return self.now.median / self.before.median

    @property
    def verdict(self) -> str:
        """Slower or faster if the spreads do not overlap, else unchanged."""
        if self.now.q3 < self.before.q1:
            return "slower"
        return "faster" if self.now.q1 > self.before.q3 else "unchanged"


@dataclass(frozen=True)
class Comparison:
    """The newest run of a command on a machine, beside the earlier ones."""

    entry: HistoryEntry
    num_earlier: int
    changes: list[Change]


def entry_of(value: Mapping[str, Any], machine: Mapping[str, Any], arguments: Sequence[str]) -> HistoryEntry:
    """Return the entry of a benchmark's document (`lab.bench.report`, or a server's), run with these arguments."""
    return HistoryEntry(
        datetime.now(UTC).isoformat(timespec="seconds"),
        revision(),
        machine,
        command_of(arguments),
        dict(_figures(value)),
    )


def _figures(value: Mapping[str, Any]) -> Iterator[tuple[str, Spread]]:
    parts = {"": value.get("capacity"), **{f"load {each['load']:g}: ": each for each in value.get("loads", ())}}
    parts |= {_place(case, len(value.get("cases", ()))): case for case in value.get("cases", ())}
    for place, part in parts.items():
        for name, ratio in (part or {}).get("ratios", {}).items():
            for figure, (label, turned) in FIGURES.items():
                if figure in ratio:
                    yield f"{place}{name} {label}", _spread(ratio[figure], turned)


def _place(case: Mapping[str, Any], number: int) -> str:
    """Return the property that distinguishes a case from the others."""
    if number == 1:
        return ""
    return f"batch {case['batch']}: " if "batch" in case else f"prompts of {case['prompt_tokens']['median']:g}: "


def _spread(ratio: Mapping[str, float], turned: bool) -> Spread:
    if not turned:
        return Spread(**ratio)
    return Spread(*(1 / ratio[name] if ratio[name] else float("inf") for name in ("q3", "median", "q1")))


def command_of(arguments: Sequence[str]) -> str:
    """Return a command line without the flags that only choose the place of the result."""
    kept, skipped = list[str](), False
    for argument in arguments:
        if skipped or argument in ALONE or argument.partition("=")[0] in WITH_PATH:
            skipped = not skipped and argument in WITH_PATH
        else:
            kept.append(argument)
    return shlex.join(["speculant", *kept])


def revision() -> str:
    """Return the commit of this source, with + if there are changes; without git, the version."""
    package = Path(__file__).parents[2]
    if _git(package, "ls-files", "--error-unmatch", __file__) is None:
        return __version__
    commit, changes = _git(package, "rev-parse", "--short", "HEAD"), _git(package, "status", "--porcelain", ".")
    return f"{commit}{'+' if changes else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def append(path: Path, value: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Append the entry of a document, run by this process's command; raises ConfigError if that is not possible."""
    entry = entry_of(value, machine, sys.argv[1:])
    with (
        Converts(ConfigError, f"{path} can't be written", "name another file."),
        path.open("a", encoding="utf-8") as file,
    ):
        file.write(json.dumps(asdict(entry), ensure_ascii=False) + "\n")


def read(path: Path) -> list[HistoryEntry]:
    """Return the entries of a history, in order; raises ConfigError for any other file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the history {path} can't be read: {error}", "make one: speculant bench latency ... --history FILE"
        ) from error
    entries = [_read_line(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise ConfigError(f"the history {path} is empty", "append to it: speculant bench latency ... --history FILE")
    return entries


def _read_line(place: str, line: str) -> HistoryEntry:
    with Converts(ConfigError, f"{place} is not an entry of a history", "remove the line, or name another file."):
        given = json.loads(line)
        figures = {str(name): Spread(**spread) for name, spread in given.pop("figures").items()}
        if not all(isinstance(value, int | float) for each in figures.values() for value in vars(each).values()):
            raise ValueError("a figure is not a number")
        return HistoryEntry(**given, figures=figures)


def compare_entries(entries: Sequence[HistoryEntry]) -> list[Comparison]:
    """Compare the newest entry of each command and machine with those before, the commands in order of their newest."""
    by_key: dict[tuple[str, str], list[HistoryEntry]] = {}
    for entry in entries:
        by_key[entry.key] = [*by_key.pop(entry.key, []), entry]
    found = list[Comparison]()
    for *earlier, entry in by_key.values():
        found.append(Comparison(entry, len(earlier), []))
        for figure, now in entry.figures.items():
            if seen := [each.figures[figure] for each in earlier if figure in each.figures]:
                found[-1].changes.append(Change(figure, now, typical(seen)))
    return found


def typical(seen: Sequence[Spread]) -> Spread:
    """Return the median of the runs' medians, with the usual bounds around it: see `Change`."""
    of_runs = Spread.of([each.median for each in seen])
    low, high = (statistics.median(getattr(each, name) for each in seen) for name in ("q1", "q3"))
    return Spread(min(low, of_runs.q1), of_runs.median, max(high, of_runs.q3))


def origin(program: Sequence[str]) -> dict[str, Any]:
    """Return the origin of a result: the command, the date, the revision, versions and the machine."""
    where = machine()
    return {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "revision": revision(),
        "versions": {"python": platform.python_version(), "torch": where.pop("torch")},
        "machine": where,
    }


def machine() -> dict[str, Any]:
    """Return the properties that two runs must share to be compared."""
    return {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
