"""Shows a training run as it goes on: a bar on a terminal, else a line now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from speculant.cli.terminal import messages

if TYPE_CHECKING:
    from speculant.lab.training.evaluation import Watcher
    from speculant.lab.training.trainer import Trainer, TrainingReport

_LOG_STEPS = 50  # steps per line of output without a terminal


def show_training(trainer: Trainer) -> None:
    """Run a trainer to its end."""
    console = messages()
    if console.is_terminal:
        _train_with_bar(trainer)
        return
    for report in trainer.run():
        if report.step % _LOG_STEPS == 0:
            console.print(_line(trainer, report))


def _train_with_bar(trainer: Trainer) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages()) as bar:
        task = bar.add_task("Training", total=1.0)
        for report in trainer.run():
            bar.update(task, completed=report.progress, description=_line(trainer, report))


def _line(trainer: Trainer, report: TrainingReport) -> str:
    left = report.elapsed * (1 / max(report.progress, 1e-9) - 1) / 60
    loss = f"{trainer.objective.name} {trainer.recent_loss():.3f}"
    return f"step {report.step}, {loss}, {report.rate:,.0f} tokens/s, {left:.0f} min left"


@contextmanager
def shown_progress(doing: str) -> Iterator[Watcher | None]:
    """Yield a function that shows the fraction done, on a terminal only."""
    console = messages()
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console) as bar:
        task: Any = bar.add_task(doing, total=1.0)
        yield lambda done: bar.update(task, completed=done)
