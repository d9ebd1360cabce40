"""Progress of the laboratory's commands: runs of a benchmark, training, and tasks whose finished fraction is known."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from speculant.cli import LINE_S, PAUSE_S, messages, minutes_left, progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress

    from speculant.lab.training import Trainer, TrainingReport, Watch

_LOG_STEPS = 50  # steps per line of output without a terminal


class Runs:
    """Shows the progress of several runs, and interim results: a bar on a terminal, otherwise occasional lines."""

    def __init__(self, number: int, console: Console, bar: Progress | None) -> None:
        self._number, self._console, self._bar = number, console, bar
        self._started = itertools.count(1)
        self._line_due = self._result_due = 0.0  # without a terminal: when the next of each may be printed
        self._task = bar.add_task("Warming up", total=number) if bar else None
        if bar is None:
            self._print("Warming up")

    def begin(self, name: str) -> None:
        """Show that a run of this name begins."""
        number, doing = next(self._started), f"Measuring {name.replace('_', ' ')}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number - 1, description=doing)
        elif time.perf_counter() >= self._line_due:
            self._print(f"{doing} (run {number} of {self._number})")

    def show(self, result: str) -> None:
        """Print an interim result."""
        if self._bar is not None or time.perf_counter() >= self._result_due:
            self._print(result)
            self._result_due = self._line_due

    def _print(self, line: str) -> None:
        self._console.print(Text(line, style="dim"))  # a style given to `print` would also apply to the bar
        self._line_due = time.perf_counter() + PAUSE_S


@contextmanager
def progress_of_runs(number: int) -> Iterator[Runs]:
    """Yield an object that shows the progress of this number of runs."""
    console = messages()
    if not console.is_terminal:
        yield Runs(number, console, None)
        return
    with progress_bar(console, refresh_per_second=1, transient=True) as bar:
        yield Runs(number, console, bar)


def show_training(trainer: Trainer) -> None:
    """Run a trainer to its end and show its progress: a bar on a terminal, otherwise occasional lines."""
    console = messages()
    if console.is_terminal:
        _train_with_bar(trainer)
        return
    for report in trainer.run():
        if report.step % _LOG_STEPS == 0 or report.measured:
            console.print(_line(trainer, report))


def _train_with_bar(trainer: Trainer) -> None:
    console = messages()
    with progress_bar(console) as bar:
        task = bar.add_task("Training", total=1.0)
        for report in trainer.run():
            bar.update(task, completed=report.progress, description=_line(trainer, replace(report, measured="")))
            if report.measured:
                console.print(_line(trainer, report))


def _line(trainer: Trainer, report: TrainingReport) -> str:
    loss = f"{trainer.objective.name} {trainer.recent_loss():.3f}"
    line = f"step {report.step}, {loss}, {report.rate:,.0f} tokens/s, {minutes_left(report.elapsed, report.progress)}"
    return f"{line}; {report.measured}" if report.measured else line


@contextmanager
def shown_progress(doing: str) -> Iterator[Watch]:
    """Yield a function that shows the fraction done: a bar on a terminal, otherwise a line about once a minute."""
    console = messages()
    if not console.is_terminal:
        yield _Lines(doing, console).show
        return
    from rich.progress import Progress

    with Progress(console=console) as bar:
        task: Any = bar.add_task(doing, total=1.0)
        yield lambda done: bar.update(task, completed=done)


class _Lines:
    """Prints the fraction done and the time left."""

    def __init__(self, doing: str, console: Console) -> None:
        self._doing, self._console = doing, console
        self._started = self._printed = time.monotonic()
        self._began: float | None = None  # the fraction that was done before

    def show(self, done: float) -> None:
        """Print a line, at most one a minute."""
        now = time.monotonic()
        if self._began is None:
            self._began, self._started = done, now
        elif now - self._printed >= LINE_S:
            self._printed = now
            own = (done - self._began) / max(1 - self._began, 1e-9)
            self._console.print(f"{self._doing}: {done:.0%}, {minutes_left(now - self._started, own)}")
