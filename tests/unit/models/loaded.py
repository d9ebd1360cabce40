"""Models that tests of stored formats load and compare."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from speculant.files import TICK
from speculant.models import Checkpoint, NativeDecoder, load_model
from speculant.models.weights import cache as weight_cache
from tests.unit.models.families import Session, random_tokens

PROMPT = random_tokens(24)
MOST_ERROR = 0.1  # of the logits' norm: native rows are rounded to int8, and decoded weights to bfloat16


def load(folder: Path, kernels: str = "reference", **options: Any) -> Checkpoint:
    """Load a model in float32."""
    return load_model(str(folder), "float32", kernels=kernels, **options)


def load_twice(folder: Path, cache: Path) -> tuple[Checkpoint, Tensor]:
    """Load a model that is packed and kept, then mapped. Returns the mapped one, and the logits of the packed one."""
    time.sleep(2 * TICK)  # younger files are not kept
    first = load(folder, "native", weight_cache=cache)
    expected = logits(first)
    for thread in threading.enumerate():
        if thread.name == weight_cache.THREAD:
            thread.join()
    again = load(folder, "native", weight_cache=cache)
    assert (first.source, again.source) == (weight_cache.KEPT, weight_cache.MAPPED)
    return again, expected


def logits(loaded: Checkpoint | Path) -> Tensor:
    """Return the logits after PROMPT; of a folder, on the reference kernels."""
    own = load(loaded) if isinstance(loaded, Path) else loaded
    return Session(own.model).extend([token % own.model.vocab_size for token in PROMPT])


def packed_of(loaded: Checkpoint) -> Any:
    """Return the packed weights of a model on the native kernels."""
    assert isinstance(loaded.model, NativeDecoder)
    return loaded.model.packed


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of the expected values."""
    return float((found - expected).norm() / expected.norm())
