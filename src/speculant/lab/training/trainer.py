"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from speculant.lab.training.checkpoint import RunState, load_checkpoint, save_checkpoint
from speculant.lab.training.config import TrainingSchedule
from speculant.lab.training.objective import Objective
from speculant.lab.training.optimizer import Optimizer


@dataclass(frozen=True)
class TrainingReport:
    """One step, for a progress display."""

    step: int
    loss: float  # in the unit of the objective
    progress: float
    rate: float  # tokens per second
    elapsed: float  # seconds of training, over all sessions
    measured: str = ""  # figures on held-out data, at steps where they are measured


class Batches(Protocol):
    """The data by number, so that a position in it is one integer."""

    def batch(self, first: int, count: int) -> Tensor:
        """Return rows first .. first + count - 1: [count, 1 + n], of which n count as tokens."""
        ...


@dataclass
class Trainer:
    """A model in training. `run` is a generator, so the caller can report progress and stop.

    measure: measures the model on held-out data after each checkpoint but the last; None = nothing is measured.
    """

    model: Any  # the nn.Module of the objective
    windows: Batches
    objective: Objective
    optimizer: Optimizer
    schedule: TrainingSchedule
    batch_size: int  # windows per step
    folder: Path
    settings: dict[str, Any]  # a resumed run must repeat them
    save_every: float = 300.0  # seconds
    clock: Callable[[], float] = time.monotonic
    measure: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        self.state = RunState()

    def resume(self) -> None:
        """Resume from the checkpoint in the run's folder."""
        self.state = load_checkpoint(self.folder, self.settings, self.model, self.optimizer)

    def run(self) -> Iterator[TrainingReport]:
        """Train until the schedule ends; report every step, and save every `save_every` seconds and at the end."""
        saved = self.state.elapsed
        while (progress := self.schedule.progress(self.state.step, self.state.elapsed)) < 1.0:
            report = self._step(progress)
            if self.state.elapsed - saved >= self.save_every:
                saved = self.state.elapsed
                self.save()
                report = replace(report, measured=self.measure() if self.measure else "")
            yield report
        self.save()

    def recent_loss(self, steps: int = 20) -> float:
        """Return the mean loss of the last steps; NaN before the first."""
        recent = self.state.losses[-steps:]
        return sum(recent) / len(recent) if recent else math.nan

    def save(self) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.folder, self.settings, self.state, self.model, self.optimizer)

    def _step(self, progress: float) -> TrainingReport:
        begun = self.clock()
        windows = self.windows.batch(self.state.step * self.batch_size, self.batch_size)
        loss = self.objective.loss(self.model, windows, progress)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(self.schedule.factor(self.state.step, progress))
        value = loss.item()  # waits for a GPU
        seconds = self.clock() - begun
        self.state.step += 1
        self.state.elapsed += seconds
        self.state.losses.append(value)
        tokens = windows[:, 1:].numel()
        return TrainingReport(self.state.step, value, progress, tokens / max(seconds, 1e-9), self.state.elapsed)
