"""The course of a training run, which is the same for every kind: prepare, train, write and measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from speculant.errors import ConfigError
from speculant.lab.training.config import RunConfig
from speculant.lab.training.losses import Objective
from speculant.lab.training.optimizer import Optimizer
from speculant.lab.training.trainer import FILE_NAME, Batches, Trainer, Watch

C = TypeVar("C", bound=RunConfig)
M = TypeVar("M")  # the measurements at the end


@contextmanager
def _silent(what: str) -> Iterator[None]:
    yield


@contextmanager
def _unwatched(what: str) -> Iterator[Watch]:
    yield lambda done: None


def _train(trainer: Trainer) -> None:
    for _ in trainer.run():
        pass


@dataclass(frozen=True)
class Show:
    """The display of a run; by default there is none.

    doing, watched: for a block and its description; watched yields a function for the fraction that is done. training:
    runs a trainer to its end.
    """

    doing: Callable[[str], AbstractContextManager[None]] = _silent
    watched: Callable[[str], AbstractContextManager[Watch]] = _unwatched
    training: Callable[[Trainer], None] = _train


SILENT = Show()


def begin_folder(out: Path, resume: bool, checkpoint: Path | None = None) -> None:
    """Make the folder of a run. Raises ConfigError if it holds another run.

    checkpoint: the folder of the run's first checkpoint; None = the same.
    """
    if not resume and ((checkpoint or out) / FILE_NAME).exists():
        raise ConfigError(f"{out} holds a run already", "add --resume to continue it, or choose another --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} can't be made: {error}", "name a folder that you may write to.") from error


class TrainingRun(ABC, Generic[C, M]):
    """A run of one kind of training: its data and model before, its outcome after the training."""

    def __init__(self, config: C, show: Show = SILENT) -> None:
        self.config, self.show = config, show

    @property
    def folder(self) -> Path:
        """The folder of the run's checkpoint."""
        return self.config.out

    def carry_out(self, resume: bool = False) -> M:
        """Train from the beginning, or from the last checkpoint, to the end. Raises ConfigError."""
        begin_folder(self.folder, resume)
        trainer = self.trainer()
        if resume:
            trainer.resume()
        self.show.training(trainer)
        return self.finish(trainer)

    def trainer(self) -> Trainer:
        """Prepare data and model, and return the trainer before its first step. Raises ConfigError."""
        torch.set_flush_denormal(True)  # gradients of unlikely tokens are subnormal, which is slow
        return self._prepared()

    @abstractmethod
    def _prepared(self) -> Trainer: ...

    @abstractmethod
    def finish(self, trainer: Trainer) -> M:
        """Write the run's folder, measure what was written on held-out data, and write its card."""

    @abstractmethod
    def summary(self, outcome: M) -> list[str]:
        """Return an outcome in lines for people."""

    def _trainer(
        self,
        model: nn.Module,
        data: Batches,
        objective: Objective,
        rates: tuple[float, float],
        settings: dict[str, Any],
        measure: Callable[[], str] | None = None,
    ) -> Trainer:
        """Return a trainer. rates: the peak learning rates of matrices and of all else. settings, measure: its own."""
        return Trainer(
            model=model,
            windows=data,
            objective=objective,
            optimizer=Optimizer(model, *rates),
            schedule=self.config.schedule,
            batch_size=self.config.batch,
            folder=self.folder,
            settings=settings,
            save_every=60 * self.config.save_minutes,
            measure=measure,
        )


def model_card(
    name: str,
    described: Sequence[str],
    trained: str,
    command: str,
    measured: str,
    table: Sequence[str],
    task: str = "text-generation",
    licence: Sequence[str] = (),
    data: Sequence[str] = (),
) -> str:
    """Return the README.md of what a run has written.

    described, trained: paragraphs on what it is and on its training, which ends with the command. measured, table: how
    it was measured, and the figures. licence: a line for the hub's metadata. data: a section on the data.
    """
    lines = ["---", *licence, "library_name: speculant", f"pipeline_tag: {task}", "---", "", f"# {name}", ""]
    lines += [*described, "", trained, "", f"    {command}", "", *data, "## Measured", "", measured, ""]
    return "\n".join([*lines, *table, ""])
