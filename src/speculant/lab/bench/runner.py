"""Runs a script of benchmarks/: its command line, its rounds, and the file of its results."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from speculant.lab.bench.history import machine, revision
from speculant.lab.bench.measuring import Spread, interleave

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A script of benchmarks/, whose results are kept in results/ beside it.

    script: its `__file__`. about: its docstring. predicted: written before the first run. measure: yields the figures
    so far, each time it has more; each time they are written, so that a later failure loses none. The file has the
    script's name, or the name that `measure` puts into `arguments.name`. rounds: default of --rounds; None = no such
    flag. options: other flags, with a default value or with keyword arguments of `add_argument`; a type makes a
    positional argument. show: returns the figures of a file as text; None = as JSON.
    """

    script: str
    about: str | None
    predicted: str
    measure: Callable[[argparse.Namespace], Iterator[Figures]]
    rounds: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    show: Callable[[Figures], str] | None = None

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Read a command line; None = that of this process."""
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(Path(self.script).name, description=self.about, formatter_class=form)
        if self.rounds is not None:
            parser.add_argument("--rounds", type=int, default=self.rounds)
        for name, option in self.options.items():
            flag = name if isinstance(option, type) else f"--{name.replace('_', '-')}"
            parser.add_argument(flag, **_settings(option))
        parser.add_argument("--json", type=Path, help="the file of the results, instead of one in results/")
        parser.add_argument("--quick", action="store_true", help="one round; nothing is written")
        found = parser.parse_args(words)
        if found.quick and self.rounds is not None:
            found.rounds = 1
        return argparse.Namespace(name=Path(self.script).stem, **vars(found))

    def main(self) -> None:
        """Measure; write and print the figures."""
        arguments, seen = self.parse(), dict[str, Figures]()
        for figures in self.measure(arguments):
            seen[arguments.name] = figures
            self._write(arguments, figures)
        for figures in seen.values():
            print(self.show(figures) if self.show else json.dumps(self._report(figures), indent=2))

    def _write(self, arguments: argparse.Namespace, figures: Figures) -> None:
        if not arguments.quick:
            path = arguments.json or Path(self.script).parent / "results" / f"{arguments.name}.json"
            path.write_text(json.dumps(self._report(figures), indent=2) + "\n", encoding="utf-8")

    def _report(self, figures: Figures) -> dict[str, Any]:
        return {
            **origin(["python", f"benchmarks/{Path(self.script).name}"]),
            "predicted": self.predicted,
            "seen": figures,
        }


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


def _settings(option: Any) -> Mapping[str, Any]:
    """Return the keyword arguments of `add_argument` for an option."""
    if isinstance(option, Mapping):
        return option
    if isinstance(option, type):
        return {"type": option}
    if isinstance(option, bool):
        return {"action": "store_true"}
    if isinstance(option, list):
        return {"nargs": "+", "type": type(option[0]), "default": option}
    return {"type": type(option), "default": option}


def timed(subjects: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every subject in every round, as `interleave` runs them."""
    return interleave({name: partial(_seconds, subject) for name, subject in subjects.items()}, rounds)


def _seconds(subject: Callable[[], Any]) -> float:
    started = time.perf_counter()
    subject()
    return time.perf_counter() - started


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quartiles of at least one value, for JSON."""
    return asdict(Spread.of(values))


def ratio(times: Mapping[str, Sequence[float]], above: str, below: str) -> dict[str, float]:
    """Return the quartiles of one subject's figures over another's, round by round."""
    return quartiles([a / b for a, b in zip(times[above], times[below], strict=True)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
