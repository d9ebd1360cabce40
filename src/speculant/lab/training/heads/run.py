"""A run from texts that a target writes to the folder of a head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from typing_extensions import override

from speculant.errors import ConfigError
from speculant.lab.checkpoints import write_json, write_tensors
from speculant.lab.training.config import HeadTrainingConfig, load_kind
from speculant.lab.training.heads.objective import HeadAcceptance, HeadInTraining
from speculant.lab.training.passes import load_plain
from speculant.lab.training.runs import TrainingRun, model_card
from speculant.lab.training.texts import Texts, open_texts
from speculant.lab.training.trainer import Trainer
from speculant.lab.training.written_texts import prepare_texts
from speculant.models import Decoder

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


class HeadRun(TrainingRun[HeadTrainingConfig, HeadOutcome]):
    """A run from texts that the target writes to the folder of a head."""

    @cached_property
    def target(self) -> Decoder:
        """The target in float32. Raises ConfigError for one that this training can't compute."""
        config = self.config
        with self.show.doing("Loading the target"):
            target = load_plain(config.target, device=config.device)
        if target.config.encoder is not None:
            raise ConfigError(
                f"{config.target} reads sources, which this training doesn't give it",
                "name a target without an encoder.",
            )
        return target

    @cached_property
    def head(self) -> HeadInTraining:
        """The head, with its first weights."""
        head = load_kind(self.config.kind).make(self.config, self.target)
        head.module.to(self.target.cache_shape.device)
        return head

    @cached_property
    def texts(self) -> Texts:
        """The target's texts, which are written if the folder lacks them."""
        prepare_texts(self.config, self.target.hidden_size, self.show, self.head.layers)
        return open_texts(self.config.out, self.target, layers=self.head.layers)

    @override
    def _prepared(self) -> Trainer:
        config, head, texts = self.config, self.head, self.texts
        head.use(texts)
        rates = config.matrix_lr, config.vector_lr
        return self._trainer(head.module, texts, head, rates, config.settings(), self._shown)

    def _shown(self) -> str:
        """Return the head's acceptance on the first held-out texts."""
        first = self.texts.num_training
        found = self.head.acceptance(torch.arange(first, min(first + _WATCHED, len(self.texts.tokens))))
        return "held-out sum min(p, q) by token " + " ".join(f"{alpha:.3f}" for alpha in found.alpha)

    @override
    def finish(self, trainer: Trainer) -> HeadOutcome:
        config, head, texts, state = self.config, self.head, self.texts, trainer.state
        with self.show.doing("Measuring on held-out texts"):
            found = head.acceptance(torch.arange(texts.num_training, len(texts.tokens)))
        tensors = {
            name: tensor.cpu().to(torch.bfloat16) if tensor.is_floating_point() else tensor.cpu()
            for name, tensor in head.tensors().items()
        }
        file = config.out / "model.safetensors"
        write_tensors(file, tensors)
        outcome = HeadOutcome(
            parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
            bytes=file.stat().st_size,
            tokens=state.step * config.batch * config.seq,
            texts=texts.num_training,
            steps=state.step,
            minutes=state.elapsed / 60,
            acceptance=found,
        )
        shares = [[round(share, 4) for share in own] for own in found.rank_shares]
        effort = {"minutes": round(outcome.minutes, 2), "steps": state.step}
        written = {"speculant_head": config.kind, **head.config(), "rank_shares": shares, "training": effort}
        write_json(config.out / "config.json", written)
        (config.out / "README.md").write_text(_card(config, outcome), encoding="utf-8")
        return outcome

    @override
    def summary(self, outcome: HeadOutcome) -> list[str]:
        size = f"{outcome.parameters:,} weights, {outcome.bytes / 2**20:.2f} MiB"
        alphas = ", ".join(f"{share:.3f}" for share in outcome.acceptance.alpha)
        return [f"{self.config.out}: {size}, {outcome.steps:,} steps", f"sum min(p, q) by drafted token: {alphas}"]


_HEADINGS = (
    "| drafted token | mean of sum min(p, q) at temperature 1 | the model's likeliest token has rank 1, 2, 3, 4 |"
)


def _card(config: HeadTrainingConfig, outcome: HeadOutcome) -> str:
    figures = outcome.acceptance
    rows = [
        f"| {depth} | {alpha:.3f} | {' '.join(f'{share:.2f}' for share in shares[:4])} |"
        for depth, (alpha, shares) in enumerate(zip(figures.alpha, figures.rank_shares, strict=True), 1)
    ]
    return model_card(
        config.out.name,
        [
            f"A head of the kind {config.kind} for the model {config.target_name}: {outcome.parameters:,} weights in",
            f"bfloat16, {outcome.bytes / 2**20:.2f} MiB. It drafts tokens, which that model verifies;",
            "it is of no use alone.",
        ],
        f"Trained on {outcome.texts:,} {'conversations' if config.chat else 'texts'} of {config.seq} tokens that the"
        f" model wrote itself, at temperature {config.temperature:g}"
        f"{'' if config.chat else ', after prompts that were cut from text files'}: {outcome.tokens:,} tokens in"
        f" {outcome.steps:,} steps, {outcome.minutes:.3g} minutes on"
        f" {'a CPU' if config.device == 'cpu' else 'a GPU'}, by",
        config.command(),
        f"On {figures.rows:,} tokens of texts that were not trained on, computed in float32. The tokens before each"
        " prediction are the model's own.",
        [
            _HEADINGS,
            "| --- | --- | --- |",
            *rows,
        ],
    )
