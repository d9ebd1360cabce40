"""The files that a benchmark writes beside its figures. Nothing heavy is imported before one is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant.engine.profiling import check_trace_path

if TYPE_CHECKING:
    from speculant.bench.measuring import Case
    from speculant.bench.runs import Mode
    from speculant.engine.build import Runtime


@dataclass(frozen=True)
class OutputFiles:
    """profile: of torch's profiler. report: HTML. trace: the phases of steps. None = not written.

    Raises ConfigError for a file that can't be written, and for a report without matplotlib.
    """

    profile: Path | None = None
    report: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_trace_path(self.profile)
        check_trace_path(self.trace)
        check_trace_path(self.report, "report", "report.html")
        if self.report is not None:
            from speculant.bench.charts import require_charts

            require_charts()

    def write(
        self, value: Mapping[str, Any], cases: Sequence[Case], runtime: Runtime, modes: Mapping[str, Mode]
    ) -> list[Path]:
        """Write the report and the trace, from one more run per case and mode; return what was written.

        value: `bench.report.document` of the cases.
        """
        if self.report is None and self.trace is None:
            return []
        from speculant.bench.samples import take_samples
        from speculant.bench.timeline import write_trace

        samples = [take_samples(runtime, case.workload, modes) for case in cases]
        if self.report is not None:
            from speculant.bench.page import write_page

            write_page(self.report, value, cases, samples)
        if self.trace is not None:
            write_trace(self.trace, {each.mode: each.spans for each in samples[0]})
        return [path for path in (self.report, self.trace) if path is not None]
