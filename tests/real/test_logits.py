"""SmolLM2-135M-Instruct in Q4_1, Gemma 3 270M in Q4_K_M: their logits are those of the weights in the files.

The reference kernels in float32 are compared with transformers on weights that the tests decode. The native kernels,
which round activations to int8, are compared with the reference, and so is llama.cpp if it is there: rounding costs
little. Gemma's texts are longer than its window of 512 positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.cache import slotted_cache
from speculant.kernels import usable_sets
from speculant.models import CausalLM, SequenceInput, build_batch, load_model
from speculant.text import Tokenizer
from speculant.types import DraftTree
from tests.real.conftest import file_of
from tests.real.llama_cpp import BaseFile, LlamaCpp, divergence
from tests.real.texts import chunks, pages
from tests.real.truth import load_gemma3, load_llama

WINDOW = 512  # of Gemma


@dataclass
class Model:
    """A model's file, and its texts of `context` tokens.

    compared: the texts that are compared with transformers, in their last `rows` rows.
    """

    file: Path
    context: int
    chosen: list[str]
    load: Callable[[Path], Any]
    compared: Callable[[list[list[int]]], list[list[int]]]
    rows: int

    @cached_property
    def texts(self) -> list[list[int]]:
        return chunks(Tokenizer.load(self.file).encode, self.context, self.chosen)

    @cached_property
    def reference(self) -> CausalLM:
        return load_model(str(self.file), "float32", kernels="reference").model


def smollm2() -> Model:
    return Model(file_of("smollm2"), 512, [], load_llama, lambda texts: texts[::4], 512)


def gemma3() -> Model:
    """A row has 262,144 logits, so some pages are read, and the ends of texts, before and after the window's end."""
    chosen = pages()[::4]
    return Model(file_of("gemma3"), 640, chosen, load_gemma3, lambda texts: [texts[0][: WINDOW - 12], *texts], 96)


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Model:
    made: Model = request.param()
    return made


def logits_of(model: CausalLM, tokens: list[int], rows: int = 0) -> Tensor:
    """Return logits [rows, vocabulary] of the last tokens in float32; 0 = of all."""
    cache = slotted_cache(model.cache_shape, 1, len(tokens))
    batch = build_batch([SequenceInput(1, tokens, DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        return model.logits(model.forward(batch, cache.storage).last[-rows:]).float().clone()


def test_reference_logits_are_the_files(model: Model) -> None:
    theirs, worst = model.load(model.file), 0.0
    for tokens in model.compared(model.texts):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), logits_to_keep=model.rows).logits[0]
        difference = (logits_of(model.reference, tokens, model.rows) - expected).abs().amax(1)
        assert difference.isfinite().all()
        worst = max(worst, float((difference / expected.std(1)).max()))
    print(f"\nlargest difference from transformers: {worst:.1e} of the logits' spread")
    assert worst < 1e-4


def test_the_window_is_crossed() -> None:
    """Tokens that no layer with a window sees change the logits through the layers without one, and those alone."""
    model = gemma3()
    tokens, others = model.texts[0], model.texts[1][:8] + model.texts[0][8:]
    assert tokens[-1] == others[-1]
    assert not torch.equal(logits_of(model.reference, tokens, 1), logits_of(model.reference, others, 1))
    assert {layer.attention.window for layer in model.reference.config.layers} == {WINDOW, None}


@pytest.fixture(scope="module")
def base(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseFile]:
    """Write the reference's log-probabilities of all texts."""
    file = BaseFile(tmp_path_factory.mktemp("base") / "base.kld", model.texts, model.reference.vocab_size)
    for tokens in model.texts:
        file.write(logits_of(model.reference, tokens))
    yield file
    file.path.unlink()


@pytest.fixture(scope="module")
def native(model: Model, base: BaseFile) -> tuple[float, float]:
    """Return the mean divergence of the native kernels over all positions, and its standard error."""
    if not usable_sets():
        pytest.skip("the native kernels are not built")
    own = load_model(str(model.file), kernels="native").model
    found = [
        divergence(expected, logits_of(own, [*tokens])[base.rows].numpy())
        for expected, tokens in zip(base.log_probs(), base.chunks, strict=True)
    ]
    positions = np.concatenate(found)
    return float(positions.mean()), float(positions.std() / len(positions) ** 0.5)


def test_the_base_file_is_the_reference(model: Model, base: BaseFile) -> None:
    """Its 16 bits are precise enough to measure rounding with."""
    tokens, own = base.chunks[0], next(base.log_probs())
    assert abs(divergence(own, logits_of(model.reference, [*tokens])[base.rows].numpy()).mean()) < 1e-5


def test_rounding_activations_costs_little(native: tuple[float, float]) -> None:
    print(f"\nmean divergence of the native kernels from float32: {native[0]:.6f} ± {native[1]:.6f}")
    assert 1e-6 < native[0] < 0.01


def test_rounding_costs_no_more_than_in_llama_cpp(
    model: Model, base: BaseFile, native: tuple[float, float], llama_cpp: LlamaCpp
) -> None:
    """Both round activations in the same groups, so their means differ by chance."""
    theirs, (ours, error) = llama_cpp.divergence(model.file, base), native
    print(f"\nmean divergence of llama.cpp from float32: {theirs:.6f}, of the native kernels: {ours:.6f} ± {error:.6f}")
    assert ours <= theirs + error
