"""The configuration of a head's training."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError, suggest
from speculant.gguf_file import name_of
from speculant.lab.training.config import TrainingSchedule, command_line
from speculant.lab.training.heads import kinds

_RANGES: dict[str, tuple[float, float]] = {
    "minutes": (1e-6, 1e7), "steps": (1, 10**9), "tokens": (1, 10**12), "seq": (8, 10**6), "batch": (1, 10**6),
    "temperature": (0, 100), "cache_gib": (1e-6, 1e6), "num_heads": (1, 64), "num_layers": (1, 64), "inner": (1, 10**6),
    "depth": (1, 16), "draft_vocab": (1, 10**7), "matrix_lr": (1e-12, 1e3), "vector_lr": (1e-12, 1e3),
    "seed": (0, 2**63 - 1), "save_minutes": (1e-6, 1e7), "warmup": (1, 10**9),
}  # fmt: skip


@dataclass(frozen=True)
class HeadTrainingConfig:
    """The head, its texts and the length of its training.

    data, suffix: files for prompts, see `TextsPlan`. tokens: of the target's output and the prompts before it, in
    texts of `seq` tokens. temperature: of that output. chat: whether the target writes conversations, its own questions
    included, in place of continuing texts. cache_gib: the limit on disk for the hidden states of these texts; fewer
    texts are used if they don't fit. num_heads: predicted tokens of heads on one state; depth: successive rows that a
    layer learns to continue from its own states. inner: the width of feed-forward blocks; None = the kind's usual one.
    draft_vocab: tokens of an output head of its own; None = it shares the target's. device: of the training; the target
    writes its texts on the CPU.
    """

    out: Path
    target: str
    kind: str
    minutes: float | None = None
    steps: int | None = None
    data: tuple[Path, ...] = ()
    suffix: str = ".py"
    tokens: int = 400_000
    seq: int = 256
    batch: int = 8
    temperature: float = 0.8
    chat: bool = False
    cache_gib: float = 1.0
    num_heads: int = 4
    num_layers: int = 1
    inner: int | None = None
    depth: int = 3
    draft_vocab: int | None = None
    warmup: int = 50
    matrix_lr: float = 0.02
    vector_lr: float = 0.002
    seed: int = 1
    save_minutes: float = 5.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.kind not in (known := kind_names()):
            raise ConfigError(f"there is no kind of head called {self.kind!r}", suggest(str(self.kind), known))
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name}={value!r} is not from {least:g} to {most:g}", f"change {name}.")
        if self.draft_vocab is not None and not may_have_output_head(self.kind):
            able = [name for name in known if may_have_output_head(name)]
            raise ConfigError(
                f"heads of the kind {self.kind} have no output head of their own",
                f"leave out --draft-vocab, or train one of the kind {' or '.join(able)}.",
            )
        _ = self.schedule

    @property
    def target_name(self) -> str:
        """The target's id, or the name of its folder or file; see `name_of`."""
        return name_of(self.target)

    @property
    def schedule(self) -> TrainingSchedule:
        """The length and the learning rates of the run."""
        return TrainingSchedule(self.steps, self.minutes, self.warmup)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must repeat; its length and its device may change."""
        changeable = {"out", "minutes", "steps", "save_minutes", "device", "data"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in changeable}

    def command(self) -> str:
        """Return the command line that starts this run, with the last part of each path."""
        return command_line("speculant train head", self)


def kind_names() -> list[str]:
    """Return the names of all kinds."""
    return sorted(module.name for module in pkgutil.iter_modules(kinds.__path__))


def may_have_output_head(name: str) -> bool:
    """Whether a kind's heads can have an output head of their own; its module announces it."""
    return bool(getattr(load_kind(name), "OWN_OUTPUT_HEAD", False))


def load_kind(name: str) -> Any:
    """Import a kind's module."""
    return importlib.import_module(f"{kinds.__name__}.{name}")
