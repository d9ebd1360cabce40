"""`speculant bench history`: what became slower since earlier runs of the same benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from speculant.cli.terminal import examples, print_json, results
from speculant.lab.cli.bench_io import AsJson

if TYPE_CHECKING:
    from speculant.lab.bench.history import Comparison

EXAMPLES = examples(
    "speculant bench latency --model demo --draft-model demo --history history.jsonl",
    "speculant bench history history.jsonl",
    "speculant bench history --json",
)
USUAL = "benchmarks/results/history.jsonl"
EXIT_SLOWER = 1
STYLES = {"slower": "bold red", "faster": "bold green", "unchanged": None}


def history(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file that --history of bench commands wrote.")] = Path(
        USUAL
    ),
    as_json: AsJson = False,
) -> None:
    """Compare the newest run of each benchmark with the earlier ones, and say what became slower.

    It compares ratios of one command on one machine: the newest run with the median of the earlier ones. A figure is
    slower if its quartiles lie below the quartiles of a typical run, and below those of the runs' medians. The exit
    code is 1 if any figure is slower.
    """
    from speculant.lab.bench.history import compare, read

    benchmarks = [_document(each) for each in compare(read(path))]
    slower = [change for each in benchmarks for change in each["figures"] if change["verdict"] == "slower"]
    if as_json:
        print_json({"file": str(path), "benchmarks": benchmarks})
    else:
        _show(benchmarks, slower)
    if slower:
        raise typer.Exit(EXIT_SLOWER)


def _document(comparison: Comparison) -> dict[str, Any]:
    entry = comparison.entry
    return {
        "command": entry.command,
        "date": entry.date,
        "revision": entry.revision,
        "machine": dict(entry.machine),
        "earlier": comparison.num_earlier,
        "figures": [
            {**asdict(change), "ratio": change.ratio, "verdict": change.verdict} for change in comparison.changes
        ],
    }


def _show(benchmarks: Sequence[Mapping[str, Any]], slower: Sequence[Mapping[str, Any]]) -> None:
    from speculant.lab.bench.report import cell

    console = results()
    for each in benchmarks:
        console.print(f"{each['command']}", style="bold")
        console.print(f"revision {each['revision']} of {each['date']}, compared with {each['earlier']} earlier runs")
        if not each["figures"]:
            console.print("nothing to compare with\n")
            continue
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for heading in ("before", "now", "now / before", ""):
            table.add_column(heading, justify="right")
        for change in each["figures"]:
            row = (cell(change["before"]), cell(change["now"]), f"{change['ratio']:.2f}", change["verdict"])
            table.add_row(change["figure"], *row, style=STYLES[change["verdict"]])
        console.print(table)
        console.print()
    named = ", ".join(f"{change['figure']} ({change['ratio']:.2f})" for change in slower)
    console.print(f"slower: {named}" if slower else "nothing became slower")
