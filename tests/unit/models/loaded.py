"""Models that tests of stored formats load and compare."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.errors import ModelError
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


class Written:
    """Quantised checkpoints, each written once beside its numbers. Tests that change one copy it.

    quantise: writes the weights of a source to a folder in a form, and the numbers that they stand for to another.
    """

    def __init__(self, source: Path, root: Path, quantise: Callable[[Path, Path, Path, Any], None]) -> None:
        self._source, self._root, self._quantise = source, root, quantise
        self._made = dict[str, tuple[Path, Tensor]]()

    def __getitem__(self, form: Any) -> tuple[Path, Tensor]:
        """Return the folder of a form, and the logits of its numbers on the reference kernels."""
        if (key := str(form)) not in self._made:
            folder = self._root / str(len(self._made))
            self._quantise(self._source, folder / "packed", folder / "numbers", form)
            self._made[key] = folder / "packed", logits(folder / "numbers")
        return self._made[key]

    def copy(self, form: Any, folder: Path) -> tuple[Path, Tensor]:
        """Return a copy in a folder, and the same logits."""
        packed, numbers = self[form]
        return shutil.copytree(packed, folder / "packed"), numbers


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(source: Path | str, *words: str) -> str:
    """Return the error with which a model is refused; it has these words and a fix."""
    with pytest.raises(ModelError) as caught:
        load_model(str(source))
    assert "Fix:" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def runs_or_is_refused(place: Path, seconds: float = 1.0) -> bool:
    """Return whether there is a model, which runs; else loading raised a ModelError. Both take less than a second."""
    started = time.process_time()
    try:
        model = load_model(str(place)).model
    except ModelError:
        return False
    finally:
        assert time.process_time() - started < seconds
    tokens = [token % model.vocab_size for token in (1, 5, 2)]
    assert Session(model, max_len=4).extend(tokens).dtype.is_floating_point
    return True
