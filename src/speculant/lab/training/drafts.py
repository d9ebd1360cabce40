"""Training of drafts on a target's texts: several for one tree, or one that drafts several tokens in one pass.

Of several drafts, each learns the tokens that the drafts before miss (arXiv 2305.09781, 3).

A draft of several tokens in one pass learns from masks: PARD (arXiv 2504.18583). At the tokens of a text, it learns as
any draft does. Some of the tokens are each followed by a chain of masks. A mask sees the text up to this token, and the
earlier masks of its chain. The mask t places after the token stands for the text's own token at that place, and learns
the target's distribution after it. So one pass over a text trains all depths of a draft at many places.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from speculant.files import read_json
from speculant.lab.training.config import BoostedConfig
from speculant.lab.training.heads import look_ahead_mask
from speculant.lab.training.losses import OutputHead, chunks, distribution_distance, overlap_parts
from speculant.lab.training.network import (
    attend_masked,
    hf_config,
    hidden_states,
    load_plain,
    new_network,
    parameter_count,
    project_embedding,
    save_weights,
    tie_stored,
    within_window,
)
from speculant.lab.training.target_texts import Texts, prepare_texts
from speculant.lab.training.trainer import (
    FILE_NAME,
    SILENT,
    Objective,
    Show,
    Trainer,
    TrainingRun,
    begin_folder,
    model_card,
)
from speculant.models import MASK, Attention, Decoder, Learned, read_model_config, resolve_folder, resolve_source

MEASURED = "measured.json"
WARM = 0.25  # of the peak rates, for a draft that begins with trained weights
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
_TEXTS_A_PASS = 8  # texts of a pass


@dataclass(frozen=True)
class BoostedOutcome:
    """The measurements of a draft, and of all drafts up to it, on texts that were not trained on.

    alpha: mean of sum min(p, q) at temperature 1. agreement: share of the tokens for which it has the target's
    likeliest token. covered: share for which any of the drafts so far has it. alone: share for which it is among the n
    likeliest tokens of the first draft, n = number of drafts. by_depth: the mean of sum min(p, q) for each of the
    tokens that it predicts in one pass.
    """

    number: int
    parameters: int
    tokens: int  # seen in training, repetitions counted
    steps: int
    minutes: float
    alpha: float
    agreement: float
    covered: float
    alone: float
    rows: int
    by_depth: Sequence[float] = ()


@dataclass(frozen=True)
class DraftsOutcome:
    """The measurements of all drafts."""

    drafts: list[BoostedOutcome]


class DraftsRun:
    """The runs of all drafts of a configuration, one after the other, on the same texts."""

    def __init__(self, config: BoostedConfig, show: Show = SILENT) -> None:
        self.config, self.show = config, show

    def carry_out(self, resume: bool = False) -> DraftsOutcome:
        """Train the drafts that are not finished yet. Raises ConfigError.

        Raises ModelError for a GGUF file as target: the files of the target's tokenizer are copied to each draft's
        folder.
        """
        config = self.config
        resolve_folder(config.target, "target")
        begin_folder(config.out, resume, config.folder(1))
        with self.show.doing("Loading the target"):
            target = load_plain(config.target)
        texts = prepare_texts(config, target, self.show)
        runs = [DraftRun(config, number, target, texts, self.show) for number in range(1, config.boosted + 1)]
        return DraftsOutcome(
            [run.read_outcome() or run.carry_out(resume and (run.folder / FILE_NAME).exists()) for run in runs]
        )

    def summary(self, outcome: DraftsOutcome) -> list[str]:
        """Return outcomes in lines for people."""
        return [line for each in outcome.drafts for line in _summary(each, self.config.folder(each.number))]


class DraftRun(TrainingRun[BoostedConfig, BoostedOutcome]):
    """The run of one draft; numbers begin at 1, and the drafts before it are in their folders."""

    def __init__(self, config: BoostedConfig, number: int, target: Decoder, texts: Texts, show: Show = SILENT) -> None:
        super().__init__(config, show)
        self.number, self._target, self._texts = number, target, texts

    @property
    @override
    def folder(self) -> Path:
        return self.config.folder(self.number)

    @override
    def _prepared(self) -> Trainer:
        config, target, texts = self.config, self._target, self._texts
        source = config.start if self.number == 1 else str(config.folder(self.number - 1))
        if source is None:
            model = new_network(self._hf_config, config.seed)
            project_embedding(model, target)
        else:
            model = tie_stored(load_plain(source, "draft").requires_grad_())
        objective: Objective
        if config.parallel > 1:
            model = with_mask(model)
            objective = ParallelObjective(target, texts, config.parallel, config.seed)
        else:
            objective = MissedObjective(target, texts, self._drafts(self.number - 1), config.known_share, config.seed)
        factor = 1.0 if source is None else WARM
        rates = factor * config.matrix_lr, factor * config.embedding_lr
        return Trainer(config, self.folder, model, texts, objective, rates, config.settings() | {"number": self.number})

    @cached_property
    def _hf_config(self) -> dict[str, Any]:
        """The config.json of a draft: that of `start`, or of a new network with the target's tokens."""
        config, target = self.config, self._target
        if config.start is not None:
            return read_model_config(resolve_source(config.start, "draft"))
        theirs = read_json(resolve_folder(config.target, "target") / "config.json")
        own = hf_config(config.network(target.max_positions), target.vocab_size)
        return own | {name: theirs[name] for name in ("bos_token_id", "eos_token_id") if name in theirs}

    def _drafts(self, count: int) -> list[Decoder]:
        return [load_plain(str(self.config.folder(each)), "draft") for each in range(1, count + 1)]

    @override
    def finish(self, trainer: Trainer) -> BoostedOutcome:
        config, source, model = self.config, resolve_folder(self.config.target, "target"), trainer.model
        save_weights(self.folder, model, self._hf_config | _mask_entries(model))
        for name in _OF_TOKENIZER:
            if (source / name).exists():
                shutil.copyfile(source / name, self.folder / name)
        with self.show.doing(f"Measuring draft {self.number}"):
            drafts = self._drafts(self.number)
            outcome = BoostedOutcome(
                number=self.number,
                parameters=parameter_count(model),
                tokens=trainer.state.step * config.batch * config.seq,
                steps=trainer.state.step,
                minutes=trainer.state.elapsed / 60,
                **measure(drafts, self._target, self._texts),
                by_depth=overlap_by_depth(drafts[-1], self._target, self._texts, config.parallel)
                if config.parallel > 1
                else (),
            )
        (self.folder / "README.md").write_text(_card(config, outcome), encoding="utf-8")
        (self.folder / MEASURED).write_text(json.dumps(vars(outcome), indent=2) + "\n", encoding="utf-8")
        return outcome

    def read_outcome(self) -> BoostedOutcome | None:
        """Return the measurements of a draft that is trained and measured; None = it is not."""
        file = self.folder / MEASURED
        return BoostedOutcome(**read_json(file)) if file.exists() else None

    @override
    def summary(self, outcome: BoostedOutcome) -> list[str]:
        return _summary(outcome, self.folder)


def _summary(outcome: BoostedOutcome, folder: Path) -> list[str]:
    alphas = ", ".join(f"{alpha:.3f}" for alpha in outcome.by_depth)
    return [
        f"{folder}: {outcome.parameters:,} weights, {outcome.steps:,} steps, {outcome.minutes:.1f} minutes of training",
        (
            f"  sum min(p, q) {outcome.alpha:.3f}, same likeliest token {outcome.agreement:.3f};"
            f" for {outcome.covered:.3f} of the tokens one of drafts 1 to {outcome.number} has it,"
            f" for {outcome.alone:.3f} the {outcome.number} likeliest tokens of draft 1 have it"
        ),
        *([f"  sum min(p, q) by token of a pass: {alphas}"] if outcome.by_depth else ()),
    ]


@torch.inference_mode()
def measure(drafts: Sequence[Decoder], target: Decoder, texts: Texts) -> dict[str, Any]:
    """Return the figures of `BoostedOutcome` for the last of these drafts."""
    head, places = OutputHead.of(target), torch.arange(texts.num_training, len(texts.tokens))
    first_head, last_head = (OutputHead.of(drafts[place], target.vocab_size) for place in (0, -1))
    sums, rows = dict.fromkeys(("alpha", "agreement", "covered", "alone"), 0.0), 0
    for part in torch.split(places, _TEXTS_A_PASS):
        tokens, own = texts.tokens[part], texts.states_of(part).flatten(0, 1)
        known = known_rows(drafts, tokens, likeliest(own, head))
        last, first = hidden_states(drafts[-1], tokens), hidden_states(drafts[0], tokens)
        sums["alpha"] += sum(float(alpha) for _, alpha, _ in overlap_parts(last[None], own, head, 1, last_head))
        ranks = overlap_parts(first[None], own, head, len(drafts), first_head)
        sums["alone"] += sum(int(counts.sum()) for _, _, counts in ranks)
        sums["agreement"] += int(known[-1].sum())
        sums["covered"] += int(known.any(0).sum())
        rows += len(own)
    return {**{name: total / rows for name, total in sums.items()}, "rows": rows}


class MissedObjective(Objective):
    """The distance to the target at the tokens for which no draft of `before` has the target's likeliest token.

    This is SpecInfer's rule for a draft's data, token by token. known_share: the share of the other tokens that count
    too; `seed` and the step select them. Windows are texts [b, 1 + n] with their places first (`Texts.batch`).
    """

    name = "distance to the target"

    def __init__(
        self, target: Decoder, texts: Texts, before: Sequence[Decoder], known_share: float = 0.0, seed: int = 0
    ) -> None:
        self._output, self._texts, self._before = OutputHead.of(target).fixed(), texts, before
        self._known_share, self._seed = known_share, seed

    @override
    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        tokens = windows[:, 1:]
        hidden = hidden_states(model, tokens)
        target_hidden = self._texts.states_of(windows[:, 0]).flatten(0, 1)
        rows = self._chosen(tokens, target_hidden, int(windows[0, 0]))
        if not len(rows):
            return hidden.sum() * 0.0
        return distribution_distance(hidden[rows], OutputHead.of(model), target_hidden[rows], self._output, progress)

    def _chosen(self, tokens: Tensor, target_hidden: Tensor, place: int) -> Tensor:
        """Return the rows [r] that are learned."""
        known = known_rows(self._before, tokens, likeliest(target_hidden, self._output)).any(0)
        generator = torch.Generator().manual_seed(self._seed + place)
        also = torch.rand(len(known), generator=generator) < self._known_share
        return (~known | also).nonzero()[:, 0]


@torch.no_grad()
def likeliest(hidden: Tensor, head: OutputHead) -> Tensor:
    """Return the likeliest tokens [r] by states [r, hidden] and an output head."""
    return torch.cat([head.logits(hidden[rows]).argmax(-1) for rows in chunks(len(hidden))])


@torch.no_grad()
def known_rows(drafts: Sequence[Decoder], tokens: Tensor, best: Tensor) -> Tensor:
    """Return for each draft whether it has the target's likeliest tokens `best` [r]: [drafts, r]."""
    found = [likeliest(hidden_states(draft, tokens), OutputHead.of(draft)) == best for draft in drafts]
    return torch.stack(found) if found else torch.zeros(1, len(best), dtype=torch.bool)


def _card(config: BoostedConfig, outcome: BoostedOutcome) -> str:
    before = "all tokens" if outcome.number == 1 else "the tokens that no draft before it predicts"
    use = "to be used in one tree" if config.parallel == 1 else f"which predicts {config.parallel} tokens in one pass"
    depths = enumerate(outcome.by_depth, start=1)
    return model_card(
        f"{config.out.name}/{outcome.number}",
        [
            f"Draft {outcome.number} of {config.boosted} for the model {config.target_name}, {use}:",
            f"{outcome.parameters:,} weights in bfloat16.",
        ],
        f"Trained on {before} of texts that the model wrote itself, at temperature {config.temperature:g}:"
        f" {outcome.tokens:,} tokens in {outcome.steps:,} steps, {outcome.minutes:.1f} minutes on a CPU, by",
        config.command(),
        f"On {outcome.rows:,} tokens of texts that were not trained on, computed in float32.",
        [
            "| | |",
            "| --- | --- |",
            f"| mean of sum min(p, q) with the target at temperature 1 | {outcome.alpha:.3f} |",
            f"| the target's likeliest token is this draft's | {outcome.agreement:.3f} |",
            f"| it is that of one of the drafts 1 to {outcome.number} | {outcome.covered:.3f} |",
            f"| it is among the {outcome.number} likeliest of draft 1 alone | {outcome.alone:.3f} |",
            *(f"| sum min(p, q) for token {depth} of a pass | {alpha:.3f} |" for depth, alpha in depths),
        ],
    )


def _mask_entries(model: Decoder) -> dict[str, Any]:
    """Return the entries of config.json of a model with a mask token."""
    mask = model.config.embedding.mask
    return {} if mask is None else {MASK: mask, "spd_type": "pard", "vocab_size": model.vocab_size}


STRIDE = 4  # tokens from one chain of masks to the next, on average


class ParallelObjective(Objective):
    """The distance of a draft's distributions from the target's, at the tokens and at `depth` - 1 masks after some.

    Windows are texts [b, 1 + n] with their places first (`Texts.batch`).
    """

    name = "distance to the target"

    def __init__(self, target: Decoder, texts: Texts, depth: int, seed: int = 0) -> None:
        self._output, self._texts, self._depth, self._seed = OutputHead.of(target).fixed(), texts, depth, seed

    @override
    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        tokens = windows[:, 1:]
        own = self._texts.states_of(windows[:, 0])
        generator = torch.Generator().manual_seed(self._seed + int(windows[:, 0].sum()))
        count = tokens.shape[1] - self._depth + 1
        places = torch.randperm(count, generator=generator)[: max(1, count // STRIDE)].sort().values
        plain, masked = masked_states(model, tokens, places, self._depth - 1)
        hidden = torch.cat((plain.flatten(0, 1), masked.flatten(0, 2)))
        targets = torch.cat((own.flatten(0, 1), own[:, _predicted(places, self._depth)].flatten(0, 2)))
        head = OutputHead.of(model, len(self._output.matrix))
        return distribution_distance(hidden, head, targets, self._output, progress)


def masked_states(model: Decoder, tokens: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the states of tokens [b, n], [b, n, hidden], and of `count` masks after places [m], [b, m, count, hidden].

    Masks see no other place's masks, and no token sees a mask.
    """
    mask, (batch, length) = model.config.embedding.mask, tokens.shape
    assert mask is not None
    extended = torch.cat((tokens, tokens.new_full((batch, len(places) * count), mask)), dim=1)
    own = torch.arange(length)
    positions = torch.cat((own, (places[:, None] + 1 + torch.arange(count)).flatten()))
    seen = {layer.window: _seen(length, places, count, layer.window) for layer in model.config.layers}

    def attend(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
        return attend_masked(of, query, key, value, seen[of.window], learned)

    *_, last = model.states(model.look_up(extended), positions, attend, tokens=extended)
    states: Tensor = model.model.norm(last)
    return states[:, :length], states[:, length:].view(batch, len(places), count, -1)


def _seen(length: int, places: Tensor, count: int, window: int | None) -> Tensor:
    """Return which keys each row sees [n + m * count, n + m * count]: tokens first, then the chains of masks."""
    own, masks = torch.arange(length), len(places) * count
    tokens = torch.cat((within_window(own, own, window), torch.zeros(length, masks, dtype=torch.bool)), 1)
    return torch.cat((tokens, look_ahead_mask(length, places, count, window)))


def _predicted(places: Tensor, depth: int) -> Tensor:
    """Return the positions [m, depth - 1] whose distributions the masks after places [m] learn."""
    return places[:, None] + 1 + torch.arange(depth - 1)


@torch.inference_mode()
def overlap_by_depth(model: Decoder, target: Decoder, texts: Texts, depth: int) -> list[float]:
    """Return the mean of sum min(p, q) at each depth of a draft, on the held-out texts, at every STRIDE-th place."""
    output = OutputHead.of(target)
    head, sums, rows = OutputHead.of(model, len(output.matrix)), torch.zeros(depth), 0
    places = torch.arange(0, texts.tokens.shape[1] - depth + 1, STRIDE)
    for part in torch.split(torch.arange(texts.num_training, len(texts.tokens)), _TEXTS_A_PASS):
        own = texts.states_of(part)
        plain, masked = masked_states(model, texts.tokens[part], places, depth - 1)
        drafted = torch.cat((plain[:, places, None], masked), 2).flatten(0, 1)  # [b * m, depth, hidden]
        wanted = own[:, places[:, None] + torch.arange(depth)].flatten(0, 1)
        for t, alpha, _ in overlap_parts(drafted.transpose(0, 1), wanted.transpose(0, 1), output, 1, head):
            sums[t] += alpha
        rows += len(drafted)
    return [float(total) / rows for total in sums]


def with_mask(model: Decoder) -> Decoder:
    """Return the model with one more row in its table and its output head, for a mask token, if it has no mask yet.

    The new row is the mean of the table; the model draws the mask hardly ever.
    """
    if model.config.embedding.mask is not None:
        return model
    size = model.vocab_size
    embedding = replace(model.config.embedding, vocab_size=size + 1, mask=size)
    made = Decoder(replace(model.config, embedding=embedding))
    with torch.no_grad():
        theirs = dict(model.named_parameters())
        for name, parameter in made.named_parameters():
            own = theirs[name]
            parameter[: len(own)] = own
            if len(parameter) > len(own):
                parameter[len(own)] = own.mean(0)
    return made
