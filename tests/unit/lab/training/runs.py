"""Runs that take a second, for the tests here."""

from __future__ import annotations

from pathlib import Path

from speculant.lab.training import Trainer, TrainingConfig, job


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


def prepare(config: TrainingConfig) -> tuple[job.Texts, Trainer]:
    """Do everything before the first step."""
    job.check_folder(config, resume=True)
    corpus = job.read_files(config)
    texts = job.tokenise(corpus, job.choose_tokenizer(config, corpus))
    return texts, job.new_trainer(config, texts)


def train(config: TrainingConfig) -> tuple[job.Texts, Trainer]:
    """Train to the end, without measuring."""
    texts, trainer = prepare(config)
    for _ in trainer.run():
        pass
    return texts, trainer
