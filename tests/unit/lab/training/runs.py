"""Runs that take a second, for the tests here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cli import app
from speculant.lab.training import Trainer, TrainingConfig, TrainingRun, begin_folder

R = TypeVar("R", bound=TrainingRun[Any, Any])
SMALL_DRAFT = "--batch 4 --hidden 16 --intermediate 24 --layers 1 --heads 2 --kv-heads 1".split()


def tiny(corpus: Path, out: Path) -> TrainingConfig:
    """Return a run whose model has a few thousand weights."""
    return TrainingConfig(
        out=out,
        data=(corpus,),
        steps=30,
        vocab_size=300,
        hidden=16,
        intermediate=32,
        layers=2,
        heads=2,
        kv_heads=1,
        max_positions=64,
        seq=32,
        batch=4,
        warmup=5,
    )


def prepare(run: R) -> tuple[R, Trainer]:
    """Do everything before the first step."""
    begin_folder(run.folder, resume=True)
    return run, run.trainer()


def train(run: R) -> tuple[R, Trainer]:
    """Train to the end, without measuring."""
    run, trainer = prepare(run)
    for _ in trainer.run():
        pass
    return run, trainer


def resume(first: Trainer, second: Trainer, saved: int) -> Trainer:
    """Let the first trainer train two steps beyond a checkpoint, and the second one from there to the end."""
    for report in first.run():
        if report.step == saved:
            first.save()
        if report.step == saved + 2:  # what came after the checkpoint is lost
            break
    second.resume()
    assert second.state.step == saved
    for _ in second.run():
        pass
    return second


def have_the_same_bits(one: Trainer, other: Trainer) -> bool:
    """Whether two runs had the same losses and ended with the same weights."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return one.state.losses == other.state.losses and all(torch.equal(*pair) for pair in pairs)


def command(*arguments: object) -> dict[str, Any]:
    """Run `speculant train` with these arguments, and return what it has measured."""
    result = CliRunner().invoke(app, ["train", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def drafts(target: str, speculation: dict[str, Any], max_tokens: int = 24, **engine: Any) -> int:
    """Check that drafts change no text of a target, and return how many tokens were drafted."""
    prompts, params = ["hello", "def f"], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    plain = LLM(target, use_speculative_decoding=False, **engine).generate(prompts, params)
    fixed = {"draft_length": "fixed", **speculation}  # whatever was measured
    drafted = LLM(target, speculative_config=fixed, **engine).generate(prompts, params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    return sum(each.metrics.speculative_decoding.num_draft_tokens for each in drafted)
