"""A run's state on disk. The new file replaces the old one atomically, so a complete one always exists."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speculant.errors import ConfigError

FILE_NAME = "checkpoint.pt"


@dataclass
class RunState:
    """The progress of a run. The step determines the position in the data; no other state is random."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all sessions
    losses: list[float] = field(default_factory=list)  # one a step, nats a token


def save_checkpoint(folder: Path, run: dict[str, Any], state: RunState, model: Any, optimizer: Any) -> None:
    """Write the state of a run. run: the settings that must not change between sessions."""
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
