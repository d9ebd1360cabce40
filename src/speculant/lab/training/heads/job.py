"""A head's training run: texts of the target, training, and the folder of the head."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors.torch import save_file

from speculant.errors import ConfigError
from speculant.lab.training.checkpoint import FILE_NAME
from speculant.lab.training.heads import texts as texts_
from speculant.lab.training.heads.base import HeadAcceptance, HeadInTraining
from speculant.lab.training.heads.config import HeadTrainingConfig, load_kind
from speculant.lab.training.heads.texts import Texts, TextsPlan
from speculant.lab.training.optimizer import Optimizer
from speculant.lab.training.passes import load_plain
from speculant.lab.training.trainer import Trainer
from speculant.models import Decoder

PROMPT_SHARE = 8  # a prompt is the first eighth of a text
_WATCHED = 16  # held-out texts that are measured during training


@dataclass(frozen=True)
class HeadOutcome:
    """The measurements of a finished run."""

    parameters: int
    bytes: int
    tokens: int  # seen in training, repetitions counted
    texts: int
    steps: int
    minutes: float
    acceptance: HeadAcceptance


def check_folder(config: HeadTrainingConfig, resume: bool) -> None:
    """Make the run's folder. Raises ConfigError if it holds another run, or one to resume is missing."""
    if not resume and (config.out / FILE_NAME).exists():
        raise ConfigError(
            f"{config.out} holds a run already", "add --resume to go on with it, or choose another --out."
        )
    config.out.mkdir(parents=True, exist_ok=True)


def load_target(config: HeadTrainingConfig) -> Decoder:
    """Load the target in float32. Raises ConfigError for a target that this training can't compute."""
    target = load_plain(config.target, device=config.device)
    if target.config.encoder is not None:
        raise ConfigError(
            f"{config.target} reads sources, which this training doesn't give it", "name a target without an encoder."
        )
    return target


def cut_prompts(documents: Sequence[Sequence[int]], config: TextsPlan, begin: int, count: int) -> list[list[int]]:
    """Return prompts from random places of documents, each after `begin`."""
    length = max(1, config.seq // PROMPT_SHARE - 1)
    long = [document for document in documents if len(document) >= length]
    if not long:
        raise ConfigError(f"no text has {length} tokens, as a prompt takes", "lower --seq, or name longer files.")
    generator = torch.Generator().manual_seed(config.seed)
    prompts = []
    for _ in range(count):
        document = long[int(torch.randint(len(long), (), generator=generator))]
        first = int(torch.randint(len(document) - length + 1, (), generator=generator))
        prompts.append([begin, *(int(token) for token in document[first : first + length])])
    return prompts


def save_texts(config: TextsPlan, found: Iterable[Sequence[int]]) -> None:
    """Keep the target's texts in the run's folder."""
    texts_.save_texts(config.out, list(found), config.seq, config.seed)


def new_head(config: HeadTrainingConfig, target: Decoder) -> HeadInTraining:
    """Make a new head."""
    torch.set_flush_denormal(True)
    head: HeadInTraining = load_kind(config.kind).make(config, target)
    head.module.to(target.cache_shape.device)
    return head


def new_trainer(config: HeadTrainingConfig, target: Decoder, head: HeadInTraining) -> Trainer:
    """Make the trainer of a head; states of texts that are missing are computed."""
    texts = texts_.open_texts(config.out, target, layers=head.layers)
    head.use(texts)
    return Trainer(
        model=head.module,
        windows=texts,
        objective=head,
        optimizer=Optimizer(head.module, config.matrix_lr, config.vector_lr),
        schedule=config.schedule,
        batch_size=config.batch,
        folder=config.out,
        settings=config.settings(),
        save_every=60 * config.save_minutes,
        measure=lambda: f"held-out sum min(p, q) by token {_shown(head, texts)}",
    )


def _shown(head: HeadInTraining, texts: Texts) -> str:
    """Return a head's acceptance on the first held-out texts."""
    first = torch.arange(texts.num_training, min(texts.num_training + _WATCHED, len(texts.tokens)))
    return " ".join(f"{alpha:.3f}" for alpha in head.acceptance(first).alpha)


def finish(config: HeadTrainingConfig, trainer: Trainer) -> HeadOutcome:
    """Measure the head on the held-out texts; write its folder and its card."""
    head, texts = cast(HeadInTraining, trainer.objective), cast(Texts, trainer.windows)
    found = head.acceptance(torch.arange(texts.num_training, len(texts.tokens)))
    tensors = {
        name: tensor.cpu().to(torch.bfloat16) if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in head.tensors().items()
    }
    file = config.out / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    shares = [[round(share, 4) for share in own] for own in found.rank_shares]
    written = {"speculant_head": config.kind, **head.config(), "rank_shares": shares, "training": _effort(trainer)}
    (config.out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    outcome = HeadOutcome(
        parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        bytes=file.stat().st_size,
        tokens=trainer.state.step * config.batch * config.seq,
        texts=texts.num_training,
        steps=trainer.state.step,
        minutes=trainer.state.elapsed / 60,
        acceptance=found,
    )
    (config.out / "README.md").write_text(head_card(config, outcome), encoding="utf-8")
    return outcome


def _effort(trainer: Trainer) -> dict[str, Any]:
    """Return the time and the steps of a run, for config.json."""
    return {"minutes": round(trainer.state.elapsed / 60, 2), "steps": trainer.state.step}


def _named(config: HeadTrainingConfig) -> str:
    return "a CPU" if config.device == "cpu" else "a GPU"


def head_card(config: HeadTrainingConfig, outcome: HeadOutcome) -> str:
    """Return the README.md of a head."""
    figures = outcome.acceptance
    rows = [
        f"| {depth} | {alpha:.3f} | {' '.join(f'{share:.2f}' for share in shares[:4])} |"
        for depth, (alpha, shares) in enumerate(zip(figures.alpha, figures.rank_shares, strict=True), 1)
    ]
    return "\n".join([
        "---", "library_name: speculant", "pipeline_tag: text-generation", "---", "",
        f"# {config.out.name}", "",
        f"A head of the kind {config.kind} for the model {config.target_name}: {outcome.parameters:,} weights in",
        f"bfloat16, {outcome.bytes / 2**20:.2f} MiB. It drafts tokens, which that model verifies;",
        "it is of no use alone.", "",
        (f"Trained on {outcome.texts:,} {'conversations' if config.chat else 'texts'} of {config.seq} tokens that the"
         f" model wrote itself, at temperature {config.temperature:g}"
         f"{'' if config.chat else ', after prompts that were cut from text files'}: {outcome.tokens:,} tokens in"
         f" {outcome.steps:,} steps, {outcome.minutes:.3g} minutes on {_named(config)}, by"), "",
        f"    {config.command()}", "",
        "## Measured", "",
        (f"On {figures.rows:,} tokens of texts that were not trained on, computed in float32. The tokens before each"
        " prediction are the model's own."), "",
        "| drafted token | mean of sum min(p, q) at temperature 1 | the model's likeliest token has rank 1, 2, 3, 4 |",
        "| --- | --- | --- |", *rows, "",
    ])  # fmt: skip
