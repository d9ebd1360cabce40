"""What bench commands do with their results: write files, and print JSON or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from speculant.cli.terminal import messages, print_json, results
from speculant.lab.bench.outputs import OutputFiles

if TYPE_CHECKING:
    from speculant.lab.bench.measuring import BenchCase, Way


def write_files(
    files: OutputFiles, value: Mapping[str, Any], cases: Sequence[BenchCase], ways: Sequence[Mapping[str, Way]]
) -> None:
    """Write what was asked for, and say where it is; see `OutputFiles.write`."""
    for path in files.write(value, cases, ways):
        messages().print(f"written: {path}", style="dim")


def show(value: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a document of `lab.bench.report`."""
    if as_json:
        print_json(value)
        return
    from speculant.lab.bench.report import conclusions, heading
    from speculant.lab.bench.tables import tables

    console, speculation = results(), value["speculation"]
    console.print(f"speculation is {'on' if speculation['on'] else 'off'}: {speculation['detail']}")
    for case in value["cases"]:
        console.print(f"\n{heading(case)}\n", style="bold")
        for table in tables(value["benchmark"], case):
            console.print(table)
            console.print()
        for line in conclusions(case):
            console.print(line)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")
