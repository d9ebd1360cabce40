"""The training of boosted drafts: one run after the other on the target's own texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from speculant.errors import ConfigError
from speculant.files import read_json
from speculant.lab.training.boosted.config import WARM, BoostedConfig
from speculant.lab.training.boosted.objective import MissedObjective, known_rows, likeliest, overlap_and_ranks
from speculant.lab.training.boosted.parallel import ParallelObjective, overlap_by_depth, with_mask
from speculant.lab.training.checkpoint import FILE_NAME
from speculant.lab.training.export import save_weights
from speculant.lab.training.heads.texts import Texts
from speculant.lab.training.network import hf_config, new_network, parameter_count, project_embedding, tie_stored
from speculant.lab.training.optimizer import Optimizer
from speculant.lab.training.output import OutputHead
from speculant.lab.training.passes import hidden_states, load_plain
from speculant.lab.training.trainer import Trainer
from speculant.models import MASK, Decoder, read_model_config, resolve_folder, resolve_source

MEASURED = "measured.json"
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
_AT_A_TIME = 8  # texts of a pass


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


def check_folder(config: BoostedConfig, resume: bool) -> None:
    """Make the run's folder. Raises ConfigError if it holds another run.

    Raises ModelError for a GGUF file as target: the files of the target's tokenizer are copied to each draft's folder.
    """
    resolve_folder(config.target, "target")
    if not resume and (config.folder(1) / FILE_NAME).exists():
        raise ConfigError(
            f"{config.out} holds a run already", "add --resume to go on with it, or choose another --out."
        )
    config.out.mkdir(parents=True, exist_ok=True)


def is_done(config: BoostedConfig, number: int) -> bool:
    """Whether a draft is trained and measured."""
    return (config.folder(number) / MEASURED).exists()


def new_trainer(config: BoostedConfig, target: Decoder, texts: Texts, number: int) -> Trainer:
    """Make a draft and its trainer; the drafts before it are in their folders."""
    torch.set_flush_denormal(True)
    source = config.start if number == 1 else str(config.folder(number - 1))
    model = (
        _new_draft(_draft_config(config, target), target, config.seed)
        if source is None
        else tie_stored(load_plain(source, "draft").requires_grad_())
    )
    if config.parallel > 1:
        model = with_mask(model)
    factor = 1.0 if source is None else WARM
    config.folder(number).mkdir(exist_ok=True)
    before = [load_plain(str(config.folder(each)), "draft") for each in range(1, number)]
    return Trainer(
        model=model,
        windows=texts,
        objective=MissedObjective(target, texts, before, config.known_share, config.seed)
        if config.parallel == 1
        else ParallelObjective(target, texts, config.parallel, config.seed),
        optimizer=Optimizer(model, factor * config.matrix_lr, factor * config.embedding_lr),
        schedule=config.schedule,
        batch_size=config.batch,
        folder=config.folder(number),
        settings=config.settings() | {"number": number},
        save_every=60 * config.save_minutes,
    )


def finish(config: BoostedConfig, target: Decoder, trainer: Trainer, number: int) -> BoostedOutcome:
    """Write a draft's folder, measure it on the held-out texts, and write its card."""
    folder, source = config.folder(number), resolve_folder(config.target, "target")
    save_weights(folder, trainer.model, _draft_config(config, target) | _mask_entries(trainer.model))
    for name in _OF_TOKENIZER:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    drafts = [load_plain(str(config.folder(each)), "draft") for each in range(1, number + 1)]
    outcome = BoostedOutcome(
        number=number,
        parameters=parameter_count(trainer.model),
        tokens=trainer.state.step * config.batch * config.seq,
        steps=trainer.state.step,
        minutes=trainer.state.elapsed / 60,
        **measure(drafts, target, cast(Texts, trainer.windows)),
        by_depth=overlap_by_depth(drafts[-1], target, cast(Texts, trainer.windows), config.parallel)
        if config.parallel > 1
        else (),
    )
    (folder / "README.md").write_text(draft_card(config, outcome), encoding="utf-8")
    (folder / MEASURED).write_text(json.dumps(vars(outcome), indent=2) + "\n", encoding="utf-8")
    return outcome


def read_outcome(config: BoostedConfig, number: int) -> BoostedOutcome:
    """Return the measurements of a draft that is done."""
    return BoostedOutcome(**read_json(config.folder(number) / MEASURED))


@torch.inference_mode()
def measure(drafts: Sequence[Decoder], target: Decoder, texts: Texts) -> dict[str, Any]:
    """Return the figures of `BoostedOutcome` for the last of these drafts."""
    head, places = OutputHead.of(target), torch.arange(texts.num_training, len(texts.tokens))
    first_head, last_head = (OutputHead.of(drafts[place], target.vocab_size) for place in (0, -1))
    sums, rows = dict.fromkeys(("alpha", "agreement", "covered", "alone"), 0.0), 0
    for part in torch.split(places, _AT_A_TIME):
        tokens, own = texts.tokens[part], texts.states_of(part).flatten(0, 1)
        known = known_rows(drafts, tokens, likeliest(own, head))
        last, first = hidden_states(drafts[-1], tokens), hidden_states(drafts[0], tokens)
        sums["alpha"] += overlap_and_ranks(last, own, (last_head, head), 1)[0]
        sums["alone"] += overlap_and_ranks(first, own, (first_head, head), len(drafts))[1]
        sums["agreement"] += int(known[-1].sum())
        sums["covered"] += int(known.any(0).sum())
        rows += len(own)
    return {**{name: total / rows for name, total in sums.items()}, "rows": rows}


def draft_card(config: BoostedConfig, outcome: BoostedOutcome) -> str:
    """Return the README.md of a draft."""
    before = "all tokens" if outcome.number == 1 else "the tokens that no draft before it predicts"
    use = "to be used in one tree" if config.parallel == 1 else f"which predicts {config.parallel} tokens in one pass"
    return "\n".join([
        "---", "library_name: speculant", "pipeline_tag: text-generation", "---", "",
        f"# {config.out.name}/{outcome.number}", "",
        f"Draft {outcome.number} of {config.boosted} for the model {config.target_name}, {use}:",
        f"{outcome.parameters:,} weights in bfloat16.", "",
        (f"Trained on {before} of texts that the model wrote itself, at temperature {config.temperature:g}:"
         f" {outcome.tokens:,} tokens in {outcome.steps:,} steps, {outcome.minutes:.1f} minutes on a CPU, by"), "",
        f"    {config.command()}", "",
        "## Measured", "",
        f"On {outcome.rows:,} tokens of texts that were not trained on, computed in float32.", "",
        "| | |", "| --- | --- |",
        f"| mean of sum min(p, q) with the target at temperature 1 | {outcome.alpha:.3f} |",
        f"| the target's likeliest token is this draft's | {outcome.agreement:.3f} |",
        f"| it is that of one of the drafts 1 to {outcome.number} | {outcome.covered:.3f} |",
        f"| it is among the {outcome.number} likeliest of draft 1 alone | {outcome.alone:.3f} |",
        *(f"| sum min(p, q) for token {depth} of a pass | {alpha:.3f} |"
          for depth, alpha in enumerate(outcome.by_depth, start=1)), "",
    ])  # fmt: skip


def _draft_config(config: BoostedConfig, target: Decoder) -> dict[str, Any]:
    """Return the config.json of a draft: that of `start`, or of a new network with the target's tokens."""
    if config.start is not None:
        return read_model_config(resolve_source(config.start, "draft"))
    theirs = read_json(resolve_folder(config.target, "target") / "config.json")
    own = hf_config(config.network(target.max_positions), target.vocab_size)
    return own | {name: theirs[name] for name in ("bos_token_id", "eos_token_id") if name in theirs}


def _mask_entries(model: Decoder) -> dict[str, Any]:
    """Return the entries of config.json of a model with a mask token."""
    mask = model.config.embedding.mask
    return {} if mask is None else {MASK: mask, "spd_type": "pard", "vocab_size": model.vocab_size}


def _new_draft(hf: dict[str, Any], target: Decoder, seed: int) -> Decoder:
    model = new_network(hf, seed)
    project_embedding(model, target)
    return model
