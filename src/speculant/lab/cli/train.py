"""`speculant train`: trains small models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli import (
    FlagGroup,
    accepts_flags,
    accepts_log_level,
    command_group,
    examples,
    messages,
    print_json,
    progress,
)
from speculant.errors import ConfigError
from speculant.lab.cli import train_draft, train_head, train_head_tokens, train_seq2seq, train_static
from speculant.lab.cli.progress import show_training, shown_progress
from speculant.lab.training import TrainingConfig

if TYPE_CHECKING:
    from speculant.lab.training import Outcome

EXAMPLES = examples(
    "speculant train lm --out target --minutes 75",
    "speculant train lm --out target --minutes 75 --resume",
    "speculant train lm --out draft --distill-from target --hidden 128 --layers 2 --minutes 15",
    "speculant train lm --out poems --data ./poems --suffix .txt --steps 2000",
)

app = command_group(help="Train small models: a target, a draft for a target, or a head.", epilog=EXAMPLES)
app.command(epilog=train_static.EXAMPLES)(accepts_log_level(train_static.static))
app.command(epilog=train_draft.EXAMPLES)(accepts_log_level(train_draft.draft))
app.command(epilog=train_seq2seq.EXAMPLES)(accepts_log_level(train_seq2seq.seq2seq))
app.command(epilog=train_head.EXAMPLES)(accepts_log_level(train_head.head))
app.command(epilog=train_head_tokens.EXAMPLES)(accepts_log_level(train_head_tokens.head_tokens))


@app.callback()
def train() -> None:
    """Train small models: a target, or a draft for a target."""


class TrainingFlags(FlagGroup):
    """The model, the data and the length of a training run."""

    sets = TrainingConfig

    out: Annotated[Path, "The folder to write: the model, its card, and the checkpoint of the run."]
    minutes: Annotated[float, "End after this many minutes of training, at a learning rate of zero."]
    steps: Annotated[int, "End after this many steps; with --minutes, whichever comes first."]
    data: Annotated[list[Path], "A folder of text files; can be repeated. Without it, Python's standard library."]
    suffix: Annotated[str, "How the text files' names end."]
    tokenizer: Annotated[Path, "Use the tokenizer of this folder instead of training one."]
    distill_from: Annotated[Path, "Train a draft on the distributions of the target in this folder."]
    vocab_size: Annotated[int, "Tokens of a new tokenizer."]
    hidden: Annotated[int, "Width of the residual stream."]
    intermediate: Annotated[int, "Width inside the feed-forward blocks."]
    layers: Annotated[int, "Number of layers."]
    heads: Annotated[int, "Attention heads."]
    kv_heads: Annotated[int, "Key heads, shared among the attention heads."]
    max_positions: Annotated[int, "The longest context that config.json names."]
    seq: Annotated[int, "Tokens in a window."]
    batch: Annotated[int, "Windows in a step."]
    warmup: Annotated[int, "Steps in which the learning rate rises."]
    matrix_lr: Annotated[float, "Peak learning rate of the layers' matrices (Muon)."]
    embedding_lr: Annotated[float, "Peak learning rate of embeddings and norms (AdamW)."]
    seed: Annotated[int, "Fixes the first weights and the order of the data."]
    save_minutes: Annotated[float, "Minutes between checkpoints."]

    def config(self) -> TrainingConfig:
        """Return the training configuration."""
        if "out" not in self.given:
            raise ConfigError("there is no folder to write to", "add --out FOLDER.")
        values = {**self.given, "data": tuple(self.given.get("data", ()))}
        return TrainingConfig(**values)


@app.command("lm", epilog=EXAMPLES)
@accepts_log_level
@accepts_flags
def lm(
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    *,
    flags: TrainingFlags,
) -> None:
    """Train a Llama-format language model, and its tokenizer, on text files.

    When the run ends, the folder can be used as `--model` or `--draft-model`. --resume continues an
    interrupted run from its last checkpoint.
    """
    config = flags.config()
    outcome = _run(config, resume)
    if as_json:
        print_json(dataclasses.asdict(outcome))
    else:
        _show(config, outcome)


def _run(config: TrainingConfig, resume: bool) -> Outcome:
    from speculant.lab.training import job

    _ = config.schedule  # before reading anything, checks that the run has an end
    job.check_folder(config, resume)
    with progress("Reading the text files"):
        corpus = job.read_files(config)
    with progress("Making the tokenizer"):
        tokenizer = job.choose_tokenizer(config, corpus)
    with progress("Tokenising"):
        texts = job.tokenise(corpus, tokenizer)
    trainer = job.new_trainer(config, texts)
    if resume:
        trainer.resume()
    show_training(trainer)
    with shown_progress("Measuring on held-out files") as watch:
        return job.finish(config, texts, trainer, watch)


def _show(config: TrainingConfig, outcome: Outcome) -> None:
    console = messages()
    console.print(f"{config.out}: {outcome.parameters:,} weights, {outcome.tokens:,} tokens in {outcome.steps:,} steps")
    console.print(f"held-out loss {outcome.held_out_loss:.3f} nats a token ({outcome.held_out_tokens:,} tokens)")
    if outcome.overlap:
        console.print(
            f"sum min(p, q) with the target {outcome.overlap.alpha:.3f},"
            f" same likeliest token {outcome.overlap.greedy_agreement:.3f}"
        )
