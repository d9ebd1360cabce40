"""Training of a language model on text files, or of a draft on its target's distributions."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from typing_extensions import override

from speculant.errors import ConfigError
from speculant.lab.training.config import TrainingConfig
from speculant.lab.training.corpus import (
    HELD_OUT_PERCENT,
    Windows,
    choose_tokenizer,
    encode,
    end_of_text,
    held_out_windows,
    line_starts,
    read_corpus,
    standard_library,
    train_tokenizer,
)
from speculant.lab.training.losses import DistillObjective, Overlap, TextObjective, evaluate, overlap
from speculant.lab.training.network import (
    export_model,
    hf_config,
    load_plain,
    new_network,
    parameter_count,
    project_embedding,
)
from speculant.lab.training.trainer import Trainer, TrainingRun, model_card
from speculant.models import Decoder


@dataclass(frozen=True)
class TokenisedCorpus:
    """A tokenised corpus."""

    tokenizer: Tokenizer
    training: list[NDArray[np.int64]]  # tokens of each document, then END_OF_TEXT
    held_out: list[NDArray[np.int64]]

    @property
    def end_of_text(self) -> int:
        """The id of END_OF_TEXT."""
        return end_of_text(self.tokenizer)


@dataclass(frozen=True)
class Outcome:
    """The measurements of a finished run. Losses are in nats per token."""

    parameters: int
    tokens: int  # seen in training, repetitions counted
    epoch_tokens: int  # in the training files
    steps: int
    minutes: float
    held_out_loss: float
    held_out_files: int
    held_out_tokens: int
    overlap: Overlap | None = None  # with the target, for a draft


class LanguageRun(TrainingRun[TrainingConfig, Outcome]):
    """A run from text files to a model folder."""

    @cached_property
    def texts(self) -> TokenisedCorpus:
        """The text files, read and tokenised."""
        config, doing = self.config, self.show.doing
        with doing("Reading the text files"):
            corpus = read_corpus(config.data or (standard_library(),), config.suffix)
        with doing("Making the tokenizer"):
            training = (document.text for document in corpus.training)
            train = partial(train_tokenizer, training, config.vocab_size)
            tokenizer = choose_tokenizer(config.out, config.distill_from or config.tokenizer, train)
        with doing("Tokenising"):
            return TokenisedCorpus(tokenizer, encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out))

    @override
    def carry_out(self, resume: bool = False) -> Outcome:
        _ = self.config.schedule  # before reading anything, checks that the run has an end
        return super().carry_out(resume)

    @override
    def _prepared(self) -> Trainer:
        config, texts = self.config, self.texts
        hf = hf_config(config, texts.tokenizer.get_vocab_size())
        model, target = new_network(hf, config.seed), self._target()
        if target:
            project_embedding(model, target)
        return Trainer(
            config,
            self.folder,
            model,
            self._windows(),
            DistillObjective(target) if target else TextObjective(),
            (config.matrix_lr, config.embedding_lr),
            {"network": hf, "tokens": _count(texts.training), **config.settings()},
        )

    def _windows(self) -> Windows:
        config, texts = self.config, self.texts
        if _count(texts.training) < 3 * config.seq:
            raise ConfigError(
                f"the files hold {_count(texts.training)} tokens, too few for windows of {config.seq}",
                "add files or lower --seq.",
            )
        starts = [line_starts(texts.tokenizer, tokens) for tokens in texts.training]
        return Windows(texts.training, starts, config.seq, texts.end_of_text, config.seed)

    def _target(self) -> Decoder | None:
        folder = self.config.distill_from
        target = load_plain(str(folder)) if folder else None
        if target is not None and target.config.encoder is not None:
            raise ConfigError(
                f"{folder} reads sources, which these texts lack", "use speculant train seq2seq --teacher."
            )
        return target

    @override
    def finish(self, trainer: Trainer) -> Outcome:
        config = self.config
        export_model(config.out, trainer.model, trainer.settings["network"], self.texts.tokenizer)
        outcome = self._measured(trainer)
        (config.out / "README.md").write_text(_card(config, outcome), encoding="utf-8")
        return outcome

    def _measured(self, trainer: Trainer) -> Outcome:
        """Measure the exported weights, in float32, on the held-out files."""
        config, texts, state = self.config, self.texts, trainer.state
        model, target = load_plain(str(config.out)), self._target()
        windows = held_out_windows(texts.held_out, config.seq, texts.end_of_text)
        with self.show.watched("Measuring on held-out files") as watch:
            return Outcome(
                parameters=parameter_count(model),
                tokens=state.step * config.batch * config.seq,
                epoch_tokens=_count(texts.training),
                steps=state.step,
                minutes=state.elapsed / 60,
                held_out_loss=evaluate(model, windows, watch),
                held_out_files=len(texts.held_out),
                held_out_tokens=_count(texts.held_out),
                overlap=overlap(target, model, windows, watch) if target else None,
            )

    @override
    def summary(self, outcome: Outcome) -> list[str]:
        return [
            f"{self.config.out}: {outcome.parameters:,} weights, {outcome.tokens:,} tokens in {outcome.steps:,} steps",
            f"held-out loss {outcome.held_out_loss:.3f} nats a token ({outcome.held_out_tokens:,} tokens)",
            *(outcome.overlap.summary() if outcome.overlap else ()),
        ]


def _count(documents: Sequence[NDArray[np.int64]]) -> int:
    return sum(map(len, documents))


def _card(config: TrainingConfig, outcome: Outcome) -> str:
    """Return the README.md. A model of the user's data has no licence until the user chooses one."""
    role = f"draft for the model in {config.distill_from.name}/" if config.distill_from else "target"
    how = (
        "Distilled from the target's distributions on the text (KL divergence turning into total variation), the"
        " embedding begun as a projection of the target's,"
        if config.distill_from
        else "Trained from scratch"
    )
    rows = [f"| held-out loss, nats a token | {outcome.held_out_loss:.3f} |"]
    if outcome.overlap:
        rows += [
            f"| mean of sum min(p, q) with the target at temperature 1 | {outcome.overlap.alpha:.3f} |",
            f"| positions where both have the same likeliest token | {outcome.overlap.greedy_agreement:.3f} |",
        ]
    return model_card(
        config.out.name,
        [
            (
                f"A small language model of program text ({role}): Llama format, {outcome.parameters:,} weights"
                f" (hidden size {config.hidden}, {config.layers} layers), bfloat16, byte-level BPE tokenizer."
            ),
            "It continues Python source; it follows no instructions and has no knowledge of facts.",
        ],
        f"{how} in float32 on a CPU: {outcome.tokens:,} tokens in {outcome.steps:,} steps,"
        f" {outcome.minutes:.0f} minutes, {outcome.tokens / outcome.epoch_tokens:.2f} passes over the data, by",
        config.command(),
        f"With the weights of this folder, computed in float32, on all {outcome.held_out_tokens:,} tokens of the"
        f" {outcome.held_out_files} held-out files. Each file is cut from its start into windows of {config.seq}"
        " tokens, and each window begins with the end-of-text token and has no earlier context.",
        ["| | |", "| --- | --- |", *rows],
        licence=[] if config.data else ["license: apache-2.0"],
        data=["## Data and licence", "", *_data(config), ""],
    )


def _data(config: TrainingConfig) -> list[str]:
    own = f"`*{config.suffix}` files below {', '.join(path.name for path in config.data)}."
    library = (
        f"The Python {platform.python_version()} standard library's own `.py` sources, tests included, as they"
        " come with the interpreter (Copyright Python Software Foundation, PSF License Version 2)."
        " The weights are under the Apache License 2.0."
    )
    held_out = (
        "A file is held out, from tokenizer and model, if the SHA-256 of its relative path, its first 8 bytes"
        f" read as a big-endian number, is below {HELD_OUT_PERCENT} modulo 100."
    )
    return [own if config.data else library, held_out]
