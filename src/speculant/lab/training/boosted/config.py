"""The configuration of boosted drafts' training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError
from speculant.gguf_file import name_of
from speculant.lab.training.config import TrainingConfig, TrainingSchedule, command_line

MOST_DRAFTS, MOST_PARALLEL = 8, 32
WARM = 0.25  # of the peak rates, for a draft that begins with trained weights
_RANGES: dict[str, tuple[float, float]] = {
    "boosted": (1, MOST_DRAFTS), "known_share": (0, 1), "tokens": (1, 10**12),
    "seq": (8, 10**6), "temperature": (0, 100), "cache_gib": (1e-6, 1e6),
}  # fmt: skip


@dataclass(frozen=True)
class BoostedConfig:
    """Drafts of one shape for a target, and the texts and the length of their training.

    boosted: the number of drafts. parallel: the tokens that a single draft predicts in one pass. minutes, steps: of
    each draft's training. start: the draft model whose weights the first draft begins with; all have its shape; None =
    random weights of the given shape. Every other draft begins with the weights of the one before. known_share: the
    share of tokens predicted by an earlier draft that are trained on too. tokens, seq, temperature, chat, cache_gib:
    see `HeadTrainingConfig`.
    """

    out: Path
    target: str
    boosted: int = 1
    parallel: int = 1
    minutes: float | None = None
    steps: int | None = None
    start: str | None = None
    data: tuple[Path, ...] = ()
    suffix: str = ".py"
    known_share: float = 0.0
    tokens: int = 400_000
    seq: int = 256
    batch: int = 8
    temperature: float = 0.8
    chat: bool = False
    cache_gib: float = 1.0
    hidden: int = 128
    intermediate: int = 240
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    warmup: int = 50
    matrix_lr: float = 0.02
    embedding_lr: float = 0.004
    seed: int = 1
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name}={value!r} is not from {least:g} to {most:g}", f"change {name}.")
        self._check_parallel()
        _ = self.schedule, self.network()

    def _check_parallel(self) -> None:
        most = min(MOST_PARALLEL, self.seq - 1)
        if isinstance(self.parallel, bool) or not 1 <= self.parallel <= most:
            raise ConfigError(f"parallel={self.parallel!r} is not from 1 to {most}", "change parallel or seq.")
        if self.parallel > 1 and self.boosted > 1:
            raise ConfigError(
                f"boosted={self.boosted} drafts can't be trained with parallel={self.parallel}",
                "leave one of the two out: a draft that predicts several tokens in one pass is used alone.",
            )

    @property
    def schedule(self) -> TrainingSchedule:
        """The length and the learning rates of each draft's run."""
        return TrainingSchedule(self.steps, self.minutes, self.warmup)

    def network(self, max_positions: int | None = None) -> TrainingConfig:
        """Return the run as the configuration of one model, which checks its numbers."""
        own = {field.name for field in fields(TrainingConfig)} - {"data", "tokenizer", "distill_from"}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name in own}
        return TrainingConfig(**values, max_positions=max_positions or max(self.seq, 1))

    def folder(self, number: int) -> Path:
        """Return the folder of a draft; numbers begin at 1."""
        return self.out / str(number)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must repeat; its length may change."""
        changeable = {"out", "boosted", "minutes", "steps", "save_minutes", "data"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in changeable}

    @property
    def target_name(self) -> str:
        """The target's id, or the name of its folder or file; see `name_of`."""
        return name_of(self.target)

    def command(self) -> str:
        """Return the command line that starts this run, with the last part of each path."""
        return command_line("speculant train draft", self)
