"""`speculant train seq2seq`: trains a small encoder-decoder model on pairs of texts, or a draft for one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli import FlagGroup, accepts_flags, examples, messages, print_json, progress
from speculant.errors import ConfigError
from speculant.lab.cli.progress import show_training, shown_progress
from speculant.lab.training import Seq2SeqConfig

if TYPE_CHECKING:
    from speculant.lab.training import Seq2SeqOutcome

EXAMPLES = examples(
    "speculant train seq2seq english.txt german.txt --out target --minutes 60",
    "speculant train seq2seq english.txt german.txt --out target --minutes 60 --resume",
    "speculant train seq2seq english.txt german.txt --out draft --teacher target --hidden 128 --layers 2 --minutes 15",
)


class Seq2SeqFlags(FlagGroup):
    """The model, its pairs of texts and the length of a run."""

    sets = Seq2SeqConfig

    out: Annotated[Path, "The folder to write: the model, its card, and the checkpoint of the run."]
    held_out_sources: Annotated[Path, "Sources of the held-out pairs. Without it, one pair in fifty is held out."]
    held_out_targets: Annotated[Path, "Targets of the held-out pairs."]
    teacher: Annotated[Path, "Train a draft on the distributions of the target in this folder."]
    tokenizer: Annotated[Path, "Use the tokenizer of this folder instead of training one."]
    minutes: Annotated[float, "End after this many minutes of training, at a learning rate of zero."]
    steps: Annotated[int, "End after this many steps; with --minutes, whichever comes first."]
    vocab_size: Annotated[int, "Tokens of a new tokenizer."]
    hidden: Annotated[int, "Width of the residual stream."]
    intermediate: Annotated[int, "Width inside the feed-forward blocks."]
    layers: Annotated[int, "Number of layers of the encoder and of the decoder."]
    decoder_layers: Annotated[int, "Number of layers of the decoder, if that differs."]
    heads: Annotated[int, "Attention heads."]
    source_tokens: Annotated[int, "Longer sources are cut to this many tokens."]
    target_tokens: Annotated[int, "Longer targets are cut to this many tokens."]
    batch: Annotated[int, "Pairs in a step."]
    warmup: Annotated[int, "Steps in which the learning rate rises."]
    matrix_lr: Annotated[float, "Peak learning rate of the layers' matrices (Muon)."]
    embedding_lr: Annotated[float, "Peak learning rate of tables and norms (AdamW)."]
    seed: Annotated[int, "Fixes the first weights and the order of the data."]
    save_minutes: Annotated[float, "Minutes between checkpoints, and between figures on held-out pairs."]
    device: Annotated[str, "Where to train: cpu or cuda."]

    def config(self, sources: Path, targets: Path) -> Seq2SeqConfig:
        """Return the training configuration."""
        if "out" not in self.given:
            raise ConfigError("there is no folder to write to", "add --out FOLDER.")
        return Seq2SeqConfig(**self.given, sources=sources, targets=targets)


@accepts_flags
def seq2seq(
    sources: Annotated[Path, typer.Argument(help="A file with a source per line; in .jsonl files a JSON string.")],
    targets: Annotated[Path, typer.Argument(help="A file of the same form with the targets, in the same order.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    *,
    flags: Seq2SeqFlags,
) -> None:
    """Train an encoder-decoder model in T5's format (1.1), and its tokenizer, on pairs of texts.

    The encoder reads a source, and the decoder learns to write its target. Texts with line breaks are JSON strings in
    .jsonl files. With --teacher, the model is a draft: it learns the teacher's distributions and has its tokenizer.
    When the run ends, the folder can be used as `--model` or `--draft-model`.
    """
    config = flags.config(sources, targets)
    outcome = _run(config, resume)
    if as_json:
        print_json(dataclasses.asdict(outcome))
    else:
        _show(config, outcome)


def _run(config: Seq2SeqConfig, resume: bool) -> Seq2SeqOutcome:
    from speculant.lab.training.seq2seq import job

    job.check_folder(config, resume)
    with progress("Reading the pairs"):
        texts = job.read_pairs(config)
    with progress("Making the tokenizer"):
        tokenizer = job.choose_tokenizer(config, texts[0])
    with progress("Tokenising"):
        data = job.tokenise(config, texts, tokenizer)
    trainer = job.new_trainer(config, data)
    if resume:
        trainer.resume()
    show_training(trainer)
    with shown_progress("Measuring on held-out pairs") as watch:
        return job.finish(config, data, trainer, watch)


def _show(config: Seq2SeqConfig, outcome: Seq2SeqOutcome) -> None:
    console = messages()
    console.print(f"{config.out}: {outcome.parameters:,} weights, {outcome.pairs:,} pairs, {outcome.steps:,} steps")
    console.print(f"held-out loss {outcome.held_out_loss:.3f} nats a token ({outcome.held_out_tokens:,} tokens)")
    if outcome.overlap:
        console.print(
            f"sum min(p, q) with the target {outcome.overlap.alpha:.3f},"
            f" same likeliest token {outcome.overlap.greedy_agreement:.3f}"
        )
