"""The course of a training run, which is the same for every kind: prepare, train, write and measure.

Muon (Jordan et al. 2024) trains the matrices inside the layers, AdamW embeddings and norms. Muon replaces a matrix's
momentum by the nearest orthogonal matrix, computed with a few Newton-Schulz steps. torch.optim.Muon runs them in
bfloat16, which CPUs without such hardware emulate; here they run in the parameters' own type, all matrices of one shape
together.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from speculant.errors import ConfigError
from speculant.lab.training.config import RunConfig
from speculant.models import Decoder

FILE_NAME = "checkpoint.pt"
Watch = Callable[[float], None]  # called with the fraction that is done


@dataclass
class RunState:
    """The progress of a run. The step determines the position in the data; no other state is random."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all sessions
    losses: list[float] = field(default_factory=list)  # one a step, nats a token


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


class Objective(Protocol):
    """A loss over a batch of windows."""

    name: str  # of the quantity that `loss` measures

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """Return the mean loss per token of windows [B, 1 + n]; `progress` of the run is in [0, 1]."""
        ...


class Trainer:
    """A model in training. `run` is a generator, so the caller can report progress and stop.

    model: the nn.Module of the objective. folder: of the checkpoint. rates: the peak learning rates of matrices and of
    all else. settings: those that a resumed run must repeat. measure: measures the model on held-out data after each
    checkpoint but the last; None = nothing is measured.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        model: Any,
        windows: Batches,
        objective: Objective,
        rates: tuple[float, float],
        settings: dict[str, Any],
        measure: Callable[[], str] | None = None,
    ) -> None:
        self.model, self.windows, self.objective = model, windows, objective
        self.settings, self.measure, self.state = settings, measure, RunState()
        self.save_every, self.clock = 60 * config.save_minutes, time.monotonic  # seconds
        self._optimizer, self._schedule, self._batch_size = Optimizer(model, *rates), config.schedule, config.batch
        self._file = folder / FILE_NAME

    def save(self) -> None:
        """Write a checkpoint; it replaces the one before atomically, so a complete one always exists."""
        parts = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        temporary = self._file.with_name(FILE_NAME + ".part")
        torch.save({"run": self.settings, "state": vars(self.state), **parts}, temporary)
        os.replace(temporary, self._file)

    def resume(self) -> None:
        """Resume from the checkpoint in the run's folder.

        Raises ConfigError if there is none, or if it was made with other settings.
        """
        if not self._file.is_file():
            raise ConfigError(f"there is no {FILE_NAME} in {self._file.parent}", "leave out --resume to start afresh.")
        content = torch.load(self._file, map_location="cpu", weights_only=True)
        changed = sorted(key for key in self.settings if content["run"].get(key) != self.settings[key])
        if changed:
            raise ConfigError(
                f"{self._file} was made with other settings: {', '.join(changed)}",
                "repeat the settings of the first run, or start afresh in another folder.",
            )
        self.model.load_state_dict(content["model"])
        self._optimizer.load_state_dict(content["optimizer"])
        self.state = RunState(**content["state"])

    def run(self) -> Iterator[TrainingReport]:
        """Train until the schedule ends; report every step, and save every `save_every` seconds and at the end."""
        saved = self.state.elapsed
        while (progress := self._schedule.progress(self.state.step, self.state.elapsed)) < 1.0:
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

    def _step(self, progress: float) -> TrainingReport:
        begun = self.clock()
        windows = self.windows.batch(self.state.step * self._batch_size, self._batch_size)
        loss = self.objective.loss(self.model, windows, progress)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(self._schedule.factor(self.state.step, progress))
        value = loss.item()  # waits for a GPU
        seconds = self.clock() - begun
        self.state.step += 1
        self.state.elapsed += seconds
        self.state.losses.append(value)
        tokens = windows[:, 1:].numel()
        return TrainingReport(self.state.step, value, progress, tokens / max(seconds, 1e-9), self.state.elapsed)


C = TypeVar("C", bound=RunConfig)
M = TypeVar("M")  # the measurements at the end


@contextmanager
def _silent(what: str) -> Iterator[None]:
    yield


@contextmanager
def _unwatched(what: str) -> Iterator[Watch]:
    yield lambda done: None


def _untold(line: str) -> None:
    pass


def _train(trainer: Trainer) -> None:
    for _ in trainer.run():
        pass


@dataclass(frozen=True)
class Show:
    """The display of a run; by default there is none.

    doing, watched: for a block and its description; watched yields a function for the fraction that is done. training:
    runs a trainer to its end. tell: shows a line that stays.
    """

    doing: Callable[[str], AbstractContextManager[None]] = _silent
    watched: Callable[[str], AbstractContextManager[Watch]] = _unwatched
    training: Callable[[Trainer], None] = _train
    tell: Callable[[str], None] = _untold


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
        """Write the run's folder, measure the model in it on held-out data, and write its card."""

    @abstractmethod
    def summary(self, outcome: M) -> list[str]:
        """Return an outcome in lines for people."""


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
    """Return the README.md of a run's folder.

    described, trained: paragraphs on what it is and on its training, which ends with the command. measured, table: how
    it was measured, and the figures. licence: a line for the hub's metadata. data: a section on the data.
    """
    lines = ["---", *licence, "library_name: speculant", f"pipeline_tag: {task}", "---", "", f"# {name}", ""]
    lines += [*described, "", trained, "", f"    {command}", "", *data, "## Measured", "", measured, ""]
    return "\n".join([*lines, *table, ""])


_OUTSIDE = ("embed_tokens", "embed_positions", "distances", "lm_head")  # names of tables
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values end between 0.7 and 1.2


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return, for each of a stack of matrices [k, m, n] with m <= n, a matrix close to its orthogonal factor.

    Every step multiplies x by a polynomial of x x^T. These polynomials commute, so the steps work on
    [m, m] matrices only, and x is multiplied once, at the end.
    """
    a, b, c = _COEFFICIENTS
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    gram = x @ x.mT
    product = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand_as(gram)
    for _ in range(steps):
        factor = b * gram + c * gram @ gram
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product, gram = factor @ product, factor @ gram @ factor
    orthogonal: Tensor = product @ x
    return orthogonal


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; the step is scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter by its orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[tuple(parameter.shape)].append(parameter)
            for parameters in by_shape.values():
                self._step_stack(parameters, group["lr"], group["momentum"])

    def _step_stack(self, parameters: list[Tensor], lr: float, momentum: float) -> None:
        stack = torch.stack([self._momentum(parameter, momentum) for parameter in parameters])
        rows, columns = stack.shape[1:]
        update = orthogonalize(stack) if rows <= columns else orthogonalize(stack.mT).mT
        scale = lr * max(1.0, rows / columns) ** 0.5
        for parameter, change in zip(parameters, update, strict=True):
            parameter.add_(change, alpha=-scale)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


class Optimizer:
    """Both optimizers with one learning-rate factor."""

    def __init__(self, model: nn.Module, matrix_lr: float, embedding_lr: float) -> None:
        inner = [(name, parameter) for name, parameter in model.named_parameters()]
        matrices = [p for name, p in inner if p.ndim == 2 and not any(part in name for part in _OUTSIDE)]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in inner if id(p) not in chosen]
        self._parts = list[tuple[torch.optim.Optimizer, float]]()
        if matrices:
            self._parts.append((Muon(matrices, matrix_lr), matrix_lr))
        if others:
            adam = torch.optim.AdamW(others, embedding_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
            self._parts.append((adam, embedding_lr))

    def step(self, factor: float) -> None:
        """Take one step at `factor` times the peak rates and clear the gradients."""
        for optimizer, lr in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        """Return the state for a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state_dict(self, state: list[Mapping[str, Any]]) -> None:
        """Restore the state of a checkpoint."""
        for (optimizer, _), part in zip(self._parts, state, strict=True):
            optimizer.load_state_dict(dict(part))
