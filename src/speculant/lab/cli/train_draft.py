"""`speculant train draft`: trains several drafts for one tree, or one that drafts several tokens in one pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli import FlagGroup, accepts_flags, examples, messages, print_json, progress
from speculant.errors import ConfigError
from speculant.lab.cli.progress import show_training
from speculant.lab.cli.target_texts import prepare_texts
from speculant.lab.training import BoostedConfig

if TYPE_CHECKING:
    from speculant.lab.training import BoostedOutcome

EXAMPLES = examples(
    "speculant train draft --boosted 2 --target demo --out drafts --minutes 10",
    "speculant train draft --parallel 8 --target demo --start demo --out drafts --minutes 20",
    "speculant train draft --boosted 3 --target demo --start demo --out drafts --minutes 5",
    "speculant train draft --boosted 3 --target demo --start demo --out drafts --minutes 5 --resume",
    """speculant generate "def" --model demo --speculative-config """
    """'{"method": "specinfer", "model": "drafts/1", "models": ["drafts/2"]}'""",
)


class BoostedFlags(FlagGroup):
    """The drafts, the texts and the length of the runs."""

    sets = BoostedConfig

    out: Annotated[Path, "The folder to write: a folder for each draft, and the target's texts."]
    target: Annotated[str, "The target: a folder, a Hugging Face id or demo."]
    boosted: Annotated[int, "Drafts to train, one after the other."]
    parallel: Annotated[int, "Tokens that the draft predicts in one pass; above 1 it is for the method parallel."]
    minutes: Annotated[float, "End each draft's training after this many minutes."]
    steps: Annotated[int, "End each draft's training after this many steps."]
    start: Annotated[str, "The draft model to begin with: a folder, an id or demo. Without it, random weights."]
    chat: Annotated[bool, "Train on conversations: the target also writes the questions."]
    data: Annotated[list[Path], "A folder of texts for prompts (default: Python's); with chat a file of questions."]
    suffix: Annotated[str, "How the text files' names end."]
    known_share: Annotated[float, "Of the tokens that earlier drafts predict, the share that is trained on too."]
    tokens: Annotated[int, "Tokens of texts that the target writes."]
    seq: Annotated[int, "Tokens in a text."]
    batch: Annotated[int, "Texts in a step."]
    temperature: Annotated[float, "Temperature of the target's texts."]
    cache_gib: Annotated[float, "Most space on disk for hidden states, in GiB."]
    hidden: Annotated[int, "Width of the residual stream."]
    intermediate: Annotated[int, "Width inside the feed-forward blocks."]
    layers: Annotated[int, "Number of layers."]
    heads: Annotated[int, "Attention heads."]
    kv_heads: Annotated[int, "Key heads, shared among the attention heads."]
    warmup: Annotated[int, "Steps in which the learning rate rises."]
    matrix_lr: Annotated[float, "Peak learning rate of the layers' matrices (Muon); a quarter for trained weights."]
    embedding_lr: Annotated[float, "Peak learning rate of embeddings and norms (AdamW); a quarter for trained weights."]
    seed: Annotated[int, "Fixes the first weights, the prompts and the order of the data."]
    save_minutes: Annotated[float, "Minutes between checkpoints."]

    def config(self) -> BoostedConfig:
        """Return the training configuration."""
        for name, example in (("out", "FOLDER"), ("target", "demo")):
            if name not in self.given:
                raise ConfigError(f"--{name} is missing", f"add --{name} {example}.")
        return BoostedConfig(**{**self.given, "data": tuple(self.given.get("data", ()))})


@accepts_flags
def draft(
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    *,
    flags: BoostedFlags,
) -> None:
    """Train several small drafts for one tree, or one draft that predicts several tokens in one pass.

    The target continues prompts. The first draft learns the target's distributions at every token of these texts. Each
    later draft learns them where no earlier one predicts the target's likeliest token. In the method specinfer, the
    first draft is the `model` and the others are the `models`. With --parallel, there is one draft, which also learns
    to predict further tokens from masks; it is the `model` of the method parallel (PARD, arXiv 2504.18583).
    """
    config = flags.config()
    outcomes = _run(config, resume)
    if as_json:
        print_json({"drafts": [dataclasses.asdict(each) for each in outcomes]})
    else:
        _show(config, outcomes)


def _run(config: BoostedConfig, resume: bool) -> list[BoostedOutcome]:
    from speculant.lab.training import FILE_NAME, load_plain, open_texts
    from speculant.lab.training.boosted import job

    job.check_folder(config, resume)
    with progress("Loading the target"):
        target = load_plain(config.target)
    prepare_texts(config, target.hidden_size)
    texts = open_texts(config.out, target)
    outcomes = []
    for number in range(1, config.boosted + 1):
        if job.is_done(config, number):
            outcomes.append(job.read_outcome(config, number))
            continue
        trainer = job.new_trainer(config, target, texts, number)
        if resume and (config.folder(number) / FILE_NAME).exists():
            trainer.resume()
        show_training(trainer)
        with progress(f"Measuring draft {number}"):
            outcomes.append(job.finish(config, target, trainer, number))
    return outcomes


def _show(config: BoostedConfig, outcomes: list[BoostedOutcome]) -> None:
    console = messages()
    for each in outcomes:
        console.print(f"{config.folder(each.number)}: {each.parameters:,} weights, {each.steps:,} steps")
        console.print(
            f"  sum min(p, q) {each.alpha:.3f}, same likeliest token {each.agreement:.3f};"
            f" for {each.covered:.3f} of the tokens one of drafts 1 to {each.number} has it,"
            f" for {each.alone:.3f} the {each.number} likeliest tokens of draft 1 have it"
        )
        if each.by_depth:
            console.print(f"  sum min(p, q) by token of a pass: {', '.join(f'{alpha:.3f}' for alpha in each.by_depth)}")
