"""Progress of the laboratory's commands: runs of a benchmark, training, and tasks whose finished fraction is known."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from speculant.cli import Bar, messages, minutes_left, progress_bar

if TYPE_CHECKING:
    from speculant.lab.training import Trainer, TrainingReport, Watch


class Runs:
    """Shows the progress of several runs, and interim results."""

    def __init__(self, number: int, bar: Bar) -> None:
        self._number, self._bar, self._started = number, bar, itertools.count(1)
        self.show = bar.show_result
        bar.show(0, "Warming up")

    def begin(self, name: str) -> None:
        """Show that a run of this name begins."""
        number = next(self._started)
        self._bar.show(number - 1, f"Measuring {name.replace('_', ' ')} (run {number} of {self._number})")


@contextmanager
def progress_of_runs(number: int) -> Iterator[Runs]:
    """Yield an object that shows the progress of this number of runs."""
    with progress_bar(number, 0.0, refresh_per_second=1, transient=True) as bar:
        yield Runs(number, bar)


def show_training(trainer: Trainer) -> None:
    """Run a trainer to its end. Show its progress and its measurements."""
    console = messages()
    with progress_bar() as bar:
        for report in trainer.run():
            bar.show(report.progress, _line(trainer, replace(report, measured="")))
            if report.measured:
                console.print(_line(trainer, report))


def _line(trainer: Trainer, report: TrainingReport) -> str:
    loss = f"{trainer.objective.name} {trainer.recent_loss():.3f}"
    left = f", {minutes_left(report.elapsed, report.progress)}" if report.progress else ""  # none before the first step
    line = f"step {report.step}, {loss}, {report.rate:,.0f} tokens/s{left}"
    return f"{line}; {report.measured}" if report.measured else line


@contextmanager
def shown_progress(doing: str) -> Iterator[Watch]:
    """Yield a function that shows the fraction done, and the time left."""
    began: tuple[float, float] | None = None  # the fraction that was done before, and the time

    with progress_bar() as bar:

        def show(done: float) -> None:
            nonlocal began
            now = time.monotonic()
            before, started = began = began or (done, now)
            own = (done - before) / max(1 - before, 1e-9)
            left = f", {minutes_left(now - started, own)}" if own else ""
            bar.show(done, f"{doing}: {done:.0%}{left}")

        yield show
