"""`speculant train head`: trains a head that drafts from a target's hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli.target_texts import prepare_texts
from speculant.cli.terminal import examples, messages, print_json, progress, show_training

if TYPE_CHECKING:
    from speculant.lab.training.heads.config import HeadTrainingConfig
    from speculant.lab.training.heads.job import HeadOutcome

EXAMPLES = examples(
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20",
    "speculant train head --kind eagle --target demo --out eagle-head --minutes 20 --resume",
    "speculant train head --kind eagle3 --target demo --out eagle3-head --draft-vocab 2048 --minutes 20",
    "speculant train head --kind eagle3 --target MODEL --chat --out head --draft-vocab 8192 --minutes 90",
    "speculant train head --kind medusa --target demo --out medusa-head --num-heads 4 --steps 2000",
)


def head(
    kind: Annotated[str, typer.Option(help="The method that the head is for.")],
    target: Annotated[str, typer.Option(help="The target: a folder or GGUF file, a Hugging Face id or demo.")],
    out: Annotated[
        Path, typer.Option(help="The folder to write: the head, its card, texts and checkpoint of the run.")
    ],
    minutes: Annotated[float | None, typer.Option(help="End after this many minutes of training.")] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many steps.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Train on conversations: the target also writes the questions.")
    ] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder of texts for prompts [default: Python's standard library]; with --chat a file of questions."
        ),
    ] = None,
    suffix: Annotated[str, typer.Option(help="How the names of these files end.")] = ".py",
    tokens: Annotated[int | None, typer.Option(help="Tokens of texts that the target writes.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a text.")] = None,
    batch: Annotated[int | None, typer.Option(help="Texts in a step.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature of the target's texts.")] = None,
    cache_gib: Annotated[float | None, typer.Option(help="Most space on disk for hidden states, in GiB.")] = None,
    num_heads: Annotated[
        int | None, typer.Option(help="Tokens to predict from one hidden state, each by its own head.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Residual blocks in each of these heads.")] = None,
    inner: Annotated[int | None, typer.Option(help="Width of feed-forward blocks.")] = None,
    depth: Annotated[
        int | None, typer.Option(help="Tokens in a row that a layer predicts from its own states.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Vocabulary of the head's own output layer [default: the target's output layer].")
    ] = None,
    matrix_lr: Annotated[float | None, typer.Option(help="Peak learning rate of matrices (Muon).")] = None,
    vector_lr: Annotated[float | None, typer.Option(help="Peak learning rate of all other weights (AdamW).")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the first weights and the prompts.")] = None,
    save_minutes: Annotated[
        float | None, typer.Option(help="Minutes between checkpoints, and between figures on held-out texts.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, or cuda [default: cpu].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Train a head on texts that the target itself writes.

    The target continues prompts; the head learns its distributions from its hidden states, which are kept on disk. When
    the run ends, the folder can be used: --speculative-config '{"method": KIND, "model": FOLDER}'.
    """
    from speculant.lab.training.heads.config import HeadTrainingConfig

    given: dict[str, Any] = {
        "chat": chat, "tokens": tokens, "seq": seq, "batch": batch, "temperature": temperature, "cache_gib": cache_gib,
        "num_heads": num_heads, "num_layers": num_layers, "inner": inner, "depth": depth,
        "draft_vocab": draft_vocab, "matrix_lr": matrix_lr, "vector_lr": vector_lr, "seed": seed,
        "save_minutes": save_minutes, "device": device,
    }  # fmt: skip
    config = HeadTrainingConfig(
        out, target, kind, minutes, steps, **{name: value for name, value in given.items() if value is not None}
    )
    outcome = _run(config, tuple(data or ()), suffix, resume)
    if as_json:
        print_json(dataclasses.asdict(outcome))
    else:
        _show(config, outcome)


def _run(config: HeadTrainingConfig, data: tuple[Path, ...], suffix: str, resume: bool) -> HeadOutcome:
    from speculant.lab.training.heads import job

    job.check_folder(config, resume)
    with progress("Loading the target"):
        model = job.load_target(config)
    new = job.new_head(config, model)
    prepare_texts(config, data, suffix, model.hidden_size, new.layers)
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
