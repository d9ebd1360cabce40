"""The training loop, and a run's state on disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from speculant.errors import ConfigError
from speculant.lab.training.config import TrainingSchedule
from speculant.lab.training.losses import Objective
from speculant.lab.training.optimizer import Optimizer

FILE_NAME = "checkpoint.pt"
Watch = Callable[[float], None]  # called with the fraction that is done


@dataclass
class RunState:
    """The progress of a run. The step determines the position in the data; no other state is random."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all sessions
    losses: list[float] = field(default_factory=list)  # one a step, nats a token


def save_checkpoint(folder: Path, run: dict[str, Any], state: RunState, model: Any, optimizer: Any) -> None:
    """Write the state of a run; the new file replaces the old one atomically, so a complete one always exists.

    run: the settings that must not change between sessions.
    """
    content = {"run": run, "state": vars(state), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    temporary = folder / (FILE_NAME + ".part")
    torch.save(content, temporary)
    os.replace(temporary, folder / FILE_NAME)


def load_checkpoint(folder: Path, run: dict[str, Any], model: Any, optimizer: Any) -> RunState:
    """Restore model and optimizer in place and return the progress of the run.

    Raises ConfigError if there is no checkpoint, or if it was made with other settings.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"there is no {FILE_NAME} in {folder}", "leave out --resume to start afresh.")
    content = torch.load(path, map_location="cpu", weights_only=True)
    changed = sorted(key for key in run if content["run"].get(key) != run[key])
    if changed:
        raise ConfigError(
            f"{path} was made with other settings: {', '.join(changed)}",
            "repeat the settings of the first run, or start afresh in another folder.",
        )
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return RunState(**content["state"])


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
