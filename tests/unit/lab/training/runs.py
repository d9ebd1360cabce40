"""Runs that take a second, for the tests here."""

from __future__ import annotations

from pathlib import Path

from speculant.lab.training import LanguageRun, Trainer, TrainingConfig, begin_folder


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


def prepare(config: TrainingConfig) -> tuple[LanguageRun, Trainer]:
    """Do everything before the first step."""
    begin_folder(config.out, resume=True)
    run = LanguageRun(config)
    return run, run.trainer()


def train(config: TrainingConfig) -> tuple[LanguageRun, Trainer]:
    """Train to the end, without measuring."""
    run, trainer = prepare(config)
    for _ in trainer.run():
        pass
    return run, trainer
