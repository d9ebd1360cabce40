"""The model card: the model, its data, the command and the measured quality."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from speculant.lab.training.config import TrainingConfig
from speculant.lab.training.corpus import HELD_OUT_PERCENT
from speculant.lab.training.evaluation import Overlap


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


def model_card(config: TrainingConfig, outcome: Outcome) -> str:
    """Return the README.md of a trained model."""
    return "\n".join([*_front_matter(config), *_story(config, outcome), *_data(config), *_measured(config, outcome)])


def _front_matter(config: TrainingConfig) -> list[str]:
    """Return the hub's metadata. A model of the user's data has no licence until the user chooses one."""
    licence = [] if config.data else ["license: apache-2.0"]
    return ["---", *licence, "library_name: speculant", "pipeline_tag: text-generation", "---", ""]


def _story(config: TrainingConfig, outcome: Outcome) -> list[str]:
    role = f"draft for the model in {config.distill_from.name}/" if config.distill_from else "target"
    how = (
        "Distilled from the target's distributions on the text (KL divergence turning into total variation), the"
        " embedding begun as a projection of the target's,"
        if config.distill_from
        else "Trained from scratch"
    )
    return [
        f"# {config.out.name}",
        "",
        (
            f"A small language model of program text ({role}): Llama format, {outcome.parameters:,} weights"
            f" (hidden size {config.hidden}, {config.layers} layers), bfloat16, byte-level BPE tokenizer."
        ),
        "It continues Python source; it follows no instructions and has no knowledge of facts.",
        "",
        (
            f"{how} in float32 on a CPU: {outcome.tokens:,} tokens in {outcome.steps:,} steps,"
            f" {outcome.minutes:.0f} minutes, {outcome.tokens / outcome.epoch_tokens:.2f} passes over the data, by"
        ),
        "",
        f"    {config.command()}",
        "",
    ]


def _data(config: TrainingConfig) -> list[str]:
    return [
        "## Data and licence",
        "",
        *(_own_files(config) if config.data else _standard_library()),
        (
            "A file is held out, from tokenizer and model, if the SHA-256 of its relative path, its first 8 bytes"
            f" read as a big-endian number, is below {HELD_OUT_PERCENT} modulo 100."
        ),
        "",
    ]


def _own_files(config: TrainingConfig) -> list[str]:
    return [f"`*{config.suffix}` files below {', '.join(path.name for path in config.data)}."]


def _standard_library() -> list[str]:
    return [
        (
            f"The Python {platform.python_version()} standard library's own `.py` sources, tests included, as they"
            " come with the interpreter (Copyright Python Software Foundation, PSF License Version 2)."
            " The weights are under the Apache License 2.0."
        ),
    ]


def _measured(config: TrainingConfig, outcome: Outcome) -> list[str]:
    lines = [
        "## Measured",
        "",
        (
            f"With the weights of this folder, computed in float32, on all {outcome.held_out_tokens:,} tokens of the"
            f" {outcome.held_out_files} held-out files. Each file is cut from its start into windows of {config.seq}"
            " tokens, and each window begins with the end-of-text token and has no earlier context."
        ),
        "",
        "| | |",
        "| --- | --- |",
        f"| held-out loss, nats a token | {outcome.held_out_loss:.3f} |",
    ]
    if outcome.overlap:
        lines += [
            f"| mean of sum min(p, q) with the target at temperature 1 | {outcome.overlap.alpha:.3f} |",
            f"| positions where both have the same likeliest token | {outcome.overlap.greedy_agreement:.3f} |",
        ]
    return [*lines, ""]
