"""Gemma 3 270M in Q4_K_M: its logits are those of the weights in the file, beyond its window too.

The reference kernels in float32 are compared with transformers on weights that the tests decode. The native kernels,
which round activations to int8, are compared with the reference. Texts are longer than the window of 512 positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.cache.storage import slotted_cache
from speculant.kernels.native import usable_sets
from speculant.models.base import CausalLM, SequenceInput, build_batch
from speculant.models.weights.load import load_model
from speculant.text.tokenizer import Tokenizer
from speculant.types import DraftTree
from tests.real.llama_cpp import BaseFile, LlamaCpp, divergence
from tests.real.texts import chunks, pages
from tests.real.truth import load_gemma3

WINDOW, CONTEXT = 512, 640
ROWS = 96  # at the end of a text; a row has 262,144 logits
TEXTS = slice(0, None, 4)  # of the pages; all would take long


@pytest.fixture(scope="module")
def texts(gemma3: Path) -> list[list[int]]:
    return chunks(Tokenizer.load(gemma3).encode, CONTEXT, pages()[TEXTS])


@pytest.fixture(scope="module")
def reference(gemma3: Path) -> CausalLM:
    return load_model(str(gemma3), "float32", kernels="reference").model


def logits_of(model: CausalLM, tokens: list[int], rows: int) -> Tensor:
    """Return logits [rows, vocabulary] of the last tokens in float32."""
    cache = slotted_cache(model.cache_shape, 1, len(tokens))
    batch = build_batch([SequenceInput(1, tokens, DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        return model.logits(model.forward(batch, cache.storage).last[-rows:]).float().clone()


def test_reference_logits_are_the_files(gemma3: Path, reference: CausalLM, texts: list[list[int]]) -> None:
    """Rows before and after the window's end."""
    model, worst = load_gemma3(gemma3), 0.0
    for tokens in (texts[0][: WINDOW - 12], *texts):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens]), logits_to_keep=ROWS).logits[0]
        difference = (logits_of(reference, tokens, ROWS) - expected).abs().amax(1)
        assert difference.isfinite().all()
        worst = max(worst, float((difference / expected.std(1)).max()))
    print(f"\nlargest difference from transformers: {worst:.1e} of the logits' spread")
    assert worst < 1e-4


def test_the_window_is_crossed(reference: CausalLM, texts: list[list[int]]) -> None:
    """Tokens that no layer with a window sees change the logits through the layers without one, and those alone."""
    tokens, others = texts[0], texts[1][:8] + texts[0][8:]
    assert tokens[-1] == others[-1]
    assert not torch.equal(logits_of(reference, tokens, 1), logits_of(reference, others, 1))
    whole = {layer.attention.window for layer in reference.config.layers}
    assert whole == {WINDOW, None}


@pytest.fixture(scope="module")
def base(reference: CausalLM, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseFile]:
    """Write the reference's log-probabilities of all texts."""
    file = BaseFile(tmp_path_factory.mktemp("base") / "base.kld", texts, reference.vocab_size)
    for tokens in texts:
        file.write(logits_of(reference, tokens, CONTEXT))
    yield file
    file.path.unlink()


@pytest.fixture(scope="module")
def native(gemma3: Path, base: BaseFile) -> tuple[float, float]:
    """Return the mean divergence of the native kernels over all positions, and its standard error."""
    if not usable_sets():
        pytest.skip("the native kernels are not built")
    model = load_model(str(gemma3), kernels="native").model
    found = [
        divergence(own, logits_of(model, [*tokens], CONTEXT)[base.rows].numpy())
        for own, tokens in zip(base.log_probs(), base.chunks, strict=True)
    ]
    positions = np.concatenate(found)
    return float(positions.mean()), float(positions.std() / len(positions) ** 0.5)


def test_rounding_activations_costs_little(native: tuple[float, float]) -> None:
    print(f"\nmean divergence of the native kernels from float32: {native[0]:.6f} ± {native[1]:.6f}")
    assert 1e-6 < native[0] < 0.01


def test_rounding_costs_no_more_than_in_llama_cpp(
    gemma3: Path, base: BaseFile, native: tuple[float, float], llama_cpp: LlamaCpp
) -> None:
    """Both round activations in the same groups, so their means differ by chance."""
    theirs, (ours, error) = llama_cpp.divergence(gemma3, base), native
    print(f"\nmean divergence of llama.cpp from float32: {theirs:.6f}, of the native kernels: {ours:.6f} ± {error:.6f}")
    assert ours <= theirs + error
