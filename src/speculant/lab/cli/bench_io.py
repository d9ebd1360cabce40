"""Flags that the bench commands share, and the output of their results: files, JSON or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from speculant.cli.flags import SamplingFlags
from speculant.cli.terminal import messages, print_json, results
from speculant.engine.profiling import check_trace_path
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.lab.bench.measuring import BenchCase, Way

MANY, FEW = 32, 4  # default numbers of prompts that run together, and one at a time

Target = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model: a folder, GGUF file, hub id or demo.")]
Prompts = Annotated[
    str,
    typer.Option(
        help="Built in: code, edit (code that begins again) or random (token ids)."
        " Or a file: a prompt per line, or JSON lines in the form of Spec-Bench."
    ),
]
Number = Annotated[int | None, typer.Option(help=f"How many prompts [default: {MANY}; all of a file].")]
FewNumber = Annotated[int | None, typer.Option(help=f"How many prompts [default: {FEW}; all of a file].")]
Lengths = Annotated[
    list[int] | None,
    typer.Option("--prompt-length", help="Tokens per prompt; can be repeated, each length is measured in turn."),
]
Rounds = Annotated[int, typer.Option(help="Runs of each mode.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write the figures and charts to this HTML file.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the phases of one prompt's steps to this file, for ui.perfetto.dev."),
]
History = Annotated[
    Path | None,
    typer.Option("--history", help="Append a line with the ratios to this file, for speculant bench history."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything that was measured as JSON.")]


class BenchSampling(SamplingFlags):
    """The same flags with other defaults: greedy, and continuing after end tokens, so that runs can be compared."""

    defaults: ClassVar[Mapping[str, object]] = {**SamplingFlags.defaults, "temperature": 0, "ignore_eos": "on"}

    def params(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """See `SamplingFlags.params`."""
        return super().params(defaults or SamplingParams(temperature=0.0, ignore_eos=True))


@dataclass(frozen=True)
class OutputFiles:
    """profile: of torch's profiler. report: HTML. trace: the phases of steps. history: gets a line. None = not written.

    Raises ConfigError for a file that can't be written, and for a report without matplotlib.
    """

    profile: Path | None = None
    report: Path | None = None
    trace: Path | None = None
    history: Path | None = None

    def __post_init__(self) -> None:
        check_trace_path(self.profile)
        check_trace_path(self.trace)
        check_trace_path(self.report, "report", "report.html")
        check_trace_path(self.history, "history", "history.jsonl")
        if self.report is not None:
            from speculant.lab.bench.page import require_charts

            require_charts()

    def write(
        self, value: Mapping[str, Any], cases: Sequence[BenchCase], ways: Sequence[Mapping[str, Way]]
    ) -> list[Path]:
        """Write the report and the trace, from one more run per case and way, and the history; return the files.

        value: `lab.bench.report.document` of the cases. ways: for each case the ways whose tokens and steps are shown.
        """
        self.record(value)
        if self.report is not None or self.trace is not None:
            from speculant.lab.bench.page import take_samples, write_trace

            samples = [take_samples(case.workload, own) for case, own in zip(cases, ways, strict=True)]
            if self.report is not None:
                from speculant.lab.bench.page import write_page

                write_page(self.report, value, cases, samples)
            if self.trace is not None:
                write_trace(self.trace, {each.mode: each.spans for each in samples[0]})
        return [path for path in (self.report, self.trace, self.history) if path is not None]

    def record(self, value: Mapping[str, Any]) -> None:
        """Append a document's ratios to the history."""
        if self.history is not None:
            from speculant.lab.bench.history import append, machine

            append(self.history, value, machine())


def write_files(
    files: OutputFiles, value: Mapping[str, Any], cases: Sequence[BenchCase], ways: Sequence[Mapping[str, Way]]
) -> None:
    """Write the requested files and print their paths; see `OutputFiles.write`."""
    for path in files.write(value, cases, ways):
        messages().print(f"written: {path}", style="dim")


def show(value: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a document of `lab.bench.report`."""
    if as_json:
        print_json(value)
        return
    from speculant.lab.bench.report import conclusions, heading, tables

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
