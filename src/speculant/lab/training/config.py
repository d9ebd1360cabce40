"""The configuration of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError

MIN_VOCABULARY = 257  # every byte, and the end of text
MOST_NUMBERS = 2**34  # weights of a network, or logits of a step: 64 GiB in float32
_OPTIONAL = ("minutes", "steps")
_WHOLE_NUMBERS = {
    "steps": (1, 10**9),
    "vocab_size": (1, 10**7),
    "hidden": (1, 10**5),
    "intermediate": (1, 10**6),
    "layers": (1, 10**4),
    "heads": (1, 10**4),
    "kv_heads": (1, 10**4),
    "max_positions": (1, 10**9),
    "seq": (1, 10**7),
    "batch": (1, 10**7),
    "warmup": (1, 10**9),
    "seed": (0, 2**63 - 1),
}
_NUMBERS = {
    "minutes": (1e-6, 1e7),
    "save_minutes": (1e-6, 1e7),
    "matrix_lr": (1e-12, 1e3),
    "embedding_lr": (1e-12, 1e3),
}


@dataclass(frozen=True)
class TrainingConfig:
    """The model, the data and the length of a run. Without `data`, the interpreter's standard library is used."""

    out: Path
    minutes: float | None = None
    steps: int | None = None
    data: tuple[Path, ...] = ()
    suffix: str = ".py"
    tokenizer: Path | None = None
    distill_from: Path | None = None
    vocab_size: int = 8192
    hidden: int = 256
    intermediate: int = 704
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 1024
    seq: int = 512
    batch: int = 8
    warmup: int = 50
    matrix_lr: float = 0.02
    embedding_lr: float = 0.004
    seed: int = 1
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_network(self)
        _check_memory(self)
        if self.vocab_size < MIN_VOCABULARY:
            raise ConfigError(
                f"a vocabulary of {self.vocab_size} can't hold all 256 bytes and the end of text",
                f"set --vocab-size to {MIN_VOCABULARY} or more.",
            )
        if self.tokenizer and self.distill_from:
            raise ConfigError("a distilled draft has its target's tokenizer", "leave out --tokenizer.")

    @property
    def schedule(self) -> TrainingSchedule:
        """The length and the learning rates of the run."""
        return TrainingSchedule(self.steps, self.minutes, self.warmup)

    def command(self) -> str:
        """Return the command line that starts this run, with the last part of each path."""
        return command_line("speculant train lm", self)


def command_line(command: str, config: Any, arguments: Sequence[str] = ()) -> str:
    """Return a command with a flag for each entry of a dataclass that is not the default; paths lose their folders.

    arguments: the names of entries that are arguments of the command, not flags.
    """
    words = [command, *(_short(getattr(config, name)) for name in arguments)]
    for field in (each for each in fields(config) if each.name not in arguments):
        value, flag = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        if value != field.default:
            parts = value if isinstance(value, tuple) else (value,)
            words += [flag if part is True else f"{flag} {_short(part)}" for part in parts]
    return " ".join(words)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).exists())
    return Path(str(value)).resolve().name if is_path else str(value)


def _check_numbers(config: TrainingConfig) -> None:
    """Check kinds and ranges; NaN is in no range."""
    for name in (*_WHOLE_NUMBERS, *_NUMBERS):
        value, whole = getattr(config, name), name in _WHOLE_NUMBERS
        if value is None and name in _OPTIONAL:
            continue
        least, most = _WHOLE_NUMBERS[name] if whole else _NUMBERS[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, int if whole else int | float)
            or not least <= value <= most
        ):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}",
                f"give a {'whole ' * whole}number from {least} to {most}, or leave it out.",
            )


def _check_memory(config: TrainingConfig) -> None:
    """Refuse a network, or a step's logits, with over MOST_NUMBERS numbers."""
    layer = 4 * config.hidden * config.hidden + 3 * config.hidden * config.intermediate
    weights, tokens = config.vocab_size * config.hidden + config.layers * layer, config.batch * config.seq
    for what, count, flags in (
        ("weights", weights, "--vocab-size, --hidden, --intermediate or --layers"),
        ("logits in a step", tokens * config.vocab_size, "--batch, --seq or --vocab-size"),
    ):
        if count > MOST_NUMBERS:
            raise ConfigError(f"this run has about {count:.1g} {what}, more than {MOST_NUMBERS:.1g}", f"lower {flags}.")


def _check_network(config: TrainingConfig) -> None:
    if config.hidden % (2 * config.heads):
        raise ConfigError(
            f"a hidden size of {config.hidden} can't be cut into {config.heads} heads of an even size",
            "choose --hidden as a multiple of twice --heads.",
        )
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"{config.heads} heads can't share {config.kv_heads} key heads evenly",
            "choose --heads as a multiple of --kv-heads.",
        )
    if config.seq > config.max_positions:
        raise ConfigError(
            f"windows of {config.seq} tokens don't fit a model of {config.max_positions} positions",
            "lower --seq or raise --max-positions.",
        )


@dataclass(frozen=True)
class TrainingSchedule:
    """A run ends after a number of steps or of minutes, whichever comes first.

    The rate rises over the first `warmup` steps, then falls in a straight line to zero at the end. With a time budget
    it depends on the clock, so a slow machine takes fewer steps but still ends on time and with a rate of zero.
    """

    steps: int | None
    minutes: float | None
    warmup: int = 50

    def __post_init__(self) -> None:
        if not self.steps and not self.minutes:
            raise ConfigError("a run needs an end", "give --steps, --minutes or both.")

    def progress(self, step: int, elapsed: float) -> float:
        """Return the share of the run that is over, in [0, 1], after `step` steps and `elapsed` seconds."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def factor(self, step: int, progress: float) -> float:
        """Return the fraction of the peak rate to use for the step with this number, counted from 0."""
        return min(1.0, (step + 1) / self.warmup) * (1.0 - progress)
