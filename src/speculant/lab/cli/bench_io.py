"""Flags that the bench commands share, and the output of their results: files, JSON or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typing_extensions import override

from speculant.cli import FlagGroup, SamplingFlags, plain_table
from speculant.engine import check_trace_path
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from speculant.lab.bench import BenchCase, Grid, Way

AsJson = Annotated[bool, typer.Option("--json", help="Print everything that was measured as JSON.")]


def shown_table(grid: Grid) -> Table:
    """Return a report's table for the terminal."""
    return plain_table(
        grid.header, grid.rows, grid.title, ["bold green" if row[0] == grid.best else None for row in grid.rows]
    )


class BenchSampling(SamplingFlags):
    """The same flags with other defaults: greedy, and continuing after end tokens, so that runs can be compared."""

    defaults: ClassVar[Mapping[str, object]] = {**SamplingFlags.defaults, "temperature": 0, "ignore_eos": "on"}

    @override
    def params(self, defaults: SamplingParams | None = None) -> SamplingParams:
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
            from speculant.lab.bench import require_charts

            require_charts()

    def write(
        self, value: Mapping[str, Any], cases: Sequence[BenchCase], ways: Sequence[Mapping[str, Way]]
    ) -> list[Path]:
        """Write the report and the trace, from one more run per case and way, and the history; return the files.

        value: `lab.bench.report.document` of the cases. ways: for each case the ways whose tokens and steps are shown.
        """
        self.record(value)
        if self.report is not None or self.trace is not None:
            from speculant.lab.bench import take_samples, write_trace

            samples = [take_samples(case.workload, own) for case, own in zip(cases, ways, strict=True)]
            if self.report is not None:
                from speculant.lab.bench import write_page

                write_page(self.report, value, cases, samples)
            if self.trace is not None:
                write_trace(self.trace, {each.mode: each.spans for each in samples[0]})
        return [path for path in (self.report, self.trace, self.history) if path is not None]

    def record(self, value: Mapping[str, Any]) -> None:
        """Append a document's ratios to the history."""
        if self.history is not None:
            from speculant.lab.bench import append, machine

            append(self.history, value, machine())


class OutputFlags(FlagGroup):
    """The files that a benchmark writes."""

    sets = OutputFiles

    profile: Annotated[
        Path, "Write a trace of the engine's steps here, for ui.perfetto.dev; profiling slows the run down."
    ]
    report: Annotated[Path, "Write the figures and charts to this HTML file."]
    trace: Annotated[Path, "Write the phases of one prompt's steps to this file, for ui.perfetto.dev."]
    history: Annotated[Path, "Append a line with the ratios to this file, for speculant bench history."]

    def files(self) -> OutputFiles:
        """Return the files; raises ConfigError for one that can't be written."""
        return OutputFiles(**self.given)


class ReportFlags(OutputFlags):
    """The files of several engines, which can't be profiled together."""

    left_out = ("profile",)


class HistoryFlags(OutputFlags):
    """The file of a server's figures."""

    left_out = ("profile", "report", "trace")
