"""Models that tests of stored formats load and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from speculant.models.native.decoder import NativeDecoder
from speculant.models.weights.load import Checkpoint, load_model
from tests.unit.models.families import Session, random_tokens

PROMPT = random_tokens(24)
MOST_ERROR = 0.1  # of the logits' norm: native rows are rounded to int8, and decoded weights to bfloat16


def load(folder: Path, kernels: str = "reference", **options: Any) -> Checkpoint:
    """Load a model in float32."""
    return load_model(str(folder), "float32", kernels=kernels, **options)


def logits(loaded: Checkpoint | Path) -> Tensor:
    """Return the logits after PROMPT; of a folder, on the reference kernels."""
    own = load(loaded) if isinstance(loaded, Path) else loaded
    return Session(own.model).extend([token % own.model.vocab_size for token in PROMPT])


def packed_of(loaded: Checkpoint) -> Any:
    """Return the packed weights of a model on the native kernels."""
    assert isinstance(loaded.model, NativeDecoder)
    return loaded.model.packed


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference over that of what was expected."""
    return float((found - expected).norm() / expected.norm())
