"""`speculant train head`: trains a head that drafts from a target's hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli import FlagGroup, accepts_flags, examples, messages, print_json, progress
from speculant.errors import ConfigError
from speculant.lab.cli.progress import show_training
from speculant.lab.cli.target_texts import prepare_texts
from speculant.lab.training import HeadTrainingConfig

if TYPE_CHECKING:
    from speculant.lab.training import HeadOutcome

EXAMPLES = examples(
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20",
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20 --resume",
    "speculant train head --kind eagle3 --target demo --out eagle3-head --draft-vocab 2048 --minutes 20",
    "speculant train head --kind eagle3 --target MODEL --chat --out head --draft-vocab 8192 --minutes 90",
    "speculant train head --kind medusa --target demo --out medusa-head --num-heads 4 --steps 2000",
)


class HeadFlags(FlagGroup):
    """The head, its texts and the length of its training."""

    sets = HeadTrainingConfig

    kind: Annotated[str, "The method that the head is for."]
    target: Annotated[str, "The target: a folder or GGUF file, a Hugging Face id or demo."]
    out: Annotated[Path, "The folder to write: the head, its card, texts and checkpoint of the run."]
    minutes: Annotated[float, "End after this many minutes of training."]
    steps: Annotated[int, "End after this many steps."]
    chat: Annotated[bool, "Train on conversations: the target also writes the questions."]
    data: Annotated[list[Path], "A folder of texts for prompts (default: Python's); with --chat a file of questions."]
    suffix: Annotated[str, "How the text files' names end."]
    tokens: Annotated[int, "Tokens of texts that the target writes."]
    seq: Annotated[int, "Tokens in a text."]
    batch: Annotated[int, "Texts in a step."]
    temperature: Annotated[float, "Temperature of the target's texts."]
    cache_gib: Annotated[float, "Most space on disk for hidden states, in GiB."]
    num_heads: Annotated[int, "Tokens to predict from one hidden state, each by its own head."]
    num_layers: Annotated[int, "Residual blocks in each of these heads."]
    inner: Annotated[int, "Width of feed-forward blocks."]
    depth: Annotated[int, "Tokens in a row that a layer predicts from its own states."]
    draft_vocab: Annotated[int, "Tokens of an output head of its own. Without it, the head uses the target's."]
    warmup: Annotated[int, "Steps in which the learning rate rises."]
    matrix_lr: Annotated[float, "Peak learning rate of matrices (Muon)."]
    vector_lr: Annotated[float, "Peak learning rate of all other weights (AdamW)."]
    seed: Annotated[int, "Fixes the first weights and the prompts."]
    save_minutes: Annotated[float, "Minutes between checkpoints, and between figures on held-out texts."]
    device: Annotated[str, "Where to train: cpu or cuda."]

    def config(self) -> HeadTrainingConfig:
        """Return the training configuration."""
        for name, example in (("kind", "KIND"), ("target", "demo"), ("out", "FOLDER")):
            if name not in self.given:
                raise ConfigError(f"--{name} is missing", f"add --{name} {example}.")
        return HeadTrainingConfig(**{**self.given, "data": tuple(self.given.get("data", ()))})


@accepts_flags
def head(
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    *,
    flags: HeadFlags,
) -> None:
    """Train a head on texts that the target itself writes.

    The target continues prompts, or with --chat writes conversations. The head learns the target's distributions from
    its hidden states, which are kept on disk. When the run ends, the folder can be used:
    --speculative-config '{"method": KIND, "model": FOLDER}'.
    """
    config = flags.config()
    outcome = _run(config, resume)
    if as_json:
        print_json(dataclasses.asdict(outcome))
    else:
        _show(config, outcome)


def _run(config: HeadTrainingConfig, resume: bool) -> HeadOutcome:
    from speculant.lab.training.heads import job

    job.check_folder(config, resume)
    with progress("Loading the target"):
        model = job.load_target(config)
    new = job.new_head(config, model)
    prepare_texts(config, model.hidden_size, new.layers)
    trainer = job.new_trainer(config, model, new)
    if resume:
        trainer.resume()
    show_training(trainer)
    with progress("Measuring on held-out texts"):
        return job.finish(config, trainer)


def _show(config: HeadTrainingConfig, outcome: HeadOutcome) -> None:
    console = messages()
    console.print(
        f"{config.out}: {outcome.parameters:,} weights, {outcome.bytes / 2**20:.2f} MiB, {outcome.steps:,} steps"
    )
    alpha: list[Any] = outcome.acceptance.alpha
    console.print("sum min(p, q) by drafted token: " + ", ".join(f"{share:.3f}" for share in alpha))
