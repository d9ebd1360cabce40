"""A corpus of a few small files, and a target trained on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speculant.lab.training import LanguageRun, TrainingConfig, load_plain
from speculant.models import Decoder
from tests.models import END, Shape, write_checkpoint
from tests.unit.lab.training.runs import tiny

NAMES = [f"package/module_{i}.py" for i in range(90)]  # one of them, 64, falls under the held-out rule
TEXT = "def get_{0}(self):\n    return self.value_{1}\n\n\nclass Item:\n    pass\n"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "package").mkdir()
    for number, name in enumerate(NAMES):
        (root / name).write_text(TEXT.format(number, number % 7) * 4)
    return root


@pytest.fixture
def config(corpus_folder: Path, tmp_path: Path) -> TrainingConfig:
    return tiny(corpus_folder, tmp_path / "model")


@pytest.fixture(scope="session")
def trained_folder(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(tiny(corpus_folder, tmp_path_factory.mktemp("runs") / "target"), hidden=32, steps=60)
    LanguageRun(config).carry_out()
    return config.out


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("random") / "target", Shape(end=END))


@pytest.fixture(scope="session")
def target(target_folder: str) -> Decoder:
    return load_plain(target_folder)
