"""The configuration of the training of an encoder-decoder model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError
from speculant.lab.training.config import TrainingConfig, TrainingSchedule, command_line


@dataclass(frozen=True)
class Seq2SeqConfig:
    """The model, its pairs of texts and the length of a run.

    sources, targets: files with a text for each pair, see `read_texts`. held_out_sources, held_out_targets: pairs that
    are measured only; None = one pair in fifty, by a hash of its source. source_tokens, target_tokens: longer texts are
    cut. teacher: a target whose distributions the model learns in place of the texts; it has the same tokenizer.
    tokenizer: the folder of a tokenizer; None = the teacher's, or a new one of `vocab_size` tokens. layers: the
    number in the encoder, and in the decoder unless `decoder_layers` is set. The files may be moved before a run is
    resumed, because their paths are not among the settings that it must repeat.
    """

    out: Path
    sources: Path
    targets: Path
    held_out_sources: Path | None = None
    held_out_targets: Path | None = None
    teacher: Path | None = None
    tokenizer: Path | None = None
    minutes: float | None = None
    steps: int | None = None
    vocab_size: int = 8192
    hidden: int = 256
    intermediate: int = 704
    layers: int = 4
    decoder_layers: int | None = None
    heads: int = 4
    source_tokens: int = 256
    target_tokens: int = 64
    batch: int = 32
    warmup: int = 50
    matrix_lr: float = 0.02
    embedding_lr: float = 0.004
    seed: int = 1
    save_minutes: float = 5.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if (self.held_out_sources is None) != (self.held_out_targets is None):
            raise ConfigError("held-out pairs need two files", "give --held-out-sources and --held-out-targets.")
        if self.teacher and self.tokenizer:
            raise ConfigError("a model with a teacher has its tokenizer", "leave out --tokenizer.")
        for tokens in (self.source_tokens, self.target_tokens):
            self._check_network(tokens)
        _ = self.schedule

    def _check_network(self, tokens: int) -> None:
        """Check the numbers as for a model that is trained on windows of `tokens` tokens. Raises ConfigError."""
        own = {field.name for field in fields(TrainingConfig)} - {"tokenizer"}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name in own}
        for layers in (self.layers, self.num_decoder_layers):
            TrainingConfig(
                **{**values, "layers": layers, "kv_heads": self.heads, "seq": tokens, "max_positions": tokens}
            )

    @property
    def num_decoder_layers(self) -> int:
        """The number of the decoder's layers."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    @property
    def schedule(self) -> TrainingSchedule:
        """The length and the learning rates of the run."""
        return TrainingSchedule(self.steps, self.minutes, self.warmup)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must repeat; its length, its device and its paths may change."""
        changeable = {"minutes", "steps", "save_minutes", "device"}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in changeable}
        paths = {name for name, value in own.items() if isinstance(value, Path)}
        return {name: value for name, value in own.items() if name not in paths} | {"taught": self.teacher is not None}

    def command(self) -> str:
        """Return the command line that starts this run, with the last part of each path."""
        return command_line("speculant train seq2seq", self, ("sources", "targets"))
