"""SmolLM2-135M-Instruct in Q4_1: its logits are those of the weights in the file, and rounding costs little.

The reference kernels in float32 are compared with transformers on the weights that the `gguf` package decodes. The
native kernels, which round activations to int8, are compared with the reference, and so is llama.cpp if it is there.
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
from tests.real.texts import chunks
from tests.real.truth import load_llama

CONTEXT = 512


@pytest.fixture(scope="module")
def texts(smollm2: Path) -> list[list[int]]:
    return chunks(Tokenizer.load(smollm2).encode, CONTEXT)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> CausalLM:
    return load_model(str(smollm2), "float32", kernels="reference").model


def logits_of(model: CausalLM, tokens: list[int]) -> Tensor:
    """Return logits [tokens, vocabulary] in float32."""
    cache = slotted_cache(model.cache_shape, 1, len(tokens))
    batch = build_batch([SequenceInput(1, tokens, DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        return model.logits(model.forward(batch, cache.storage).last).float().clone()


@pytest.fixture(scope="module")
def base(reference: CausalLM, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseFile]:
    """Write the reference's log-probabilities of all texts."""
    file = BaseFile(tmp_path_factory.mktemp("base") / "base.kld", texts, reference.vocab_size)
    for tokens in texts:
        file.write(logits_of(reference, tokens))
    yield file
    file.path.unlink()


def test_reference_logits_are_the_files(smollm2: Path, reference: CausalLM, texts: list[list[int]]) -> None:
    model, worst = load_llama(smollm2), 0.0
    for tokens in texts[::4]:
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0]
        difference = (logits_of(reference, tokens) - expected).abs().amax(1)
        assert difference.isfinite().all()
        worst = max(worst, float((difference / expected.std(1)).max()))
    print(f"\nlargest difference from transformers: {worst:.1e} of the logits' spread")
    assert worst < 1e-4


@pytest.fixture(scope="module")
def native(smollm2: Path, base: BaseFile) -> tuple[float, float]:
    """Return the mean divergence of the native kernels over all positions, and its standard error."""
    if not usable_sets():
        pytest.skip("the native kernels are not built")
    model = load_model(str(smollm2), kernels="native").model
    found = [
        divergence(own, logits_of(model, [*tokens])[base.rows].numpy())
        for own, tokens in zip(base.log_probs(), base.chunks, strict=True)
    ]
    positions = np.concatenate(found)
    return float(positions.mean()), float(positions.std() / len(positions) ** 0.5)


def test_the_base_file_is_the_reference(reference: CausalLM, base: BaseFile) -> None:
    """Its 16 bits are precise enough to measure rounding with."""
    tokens, own = base.chunks[0], next(base.log_probs())
    assert abs(divergence(own, logits_of(reference, [*tokens])[base.rows].numpy()).mean()) < 1e-5


def test_rounding_activations_costs_little(native: tuple[float, float]) -> None:
    print(f"\nmean divergence of the native kernels from float32: {native[0]:.6f} ± {native[1]:.6f}")
    assert 1e-6 < native[0] < 0.01


def test_rounding_costs_no_more_than_in_llama_cpp(
    smollm2: Path, base: BaseFile, native: tuple[float, float], llama_cpp: LlamaCpp
) -> None:
    """Both round activations in the same groups, so their means differ by chance."""
    theirs, (ours, error) = llama_cpp.divergence(smollm2, base), native
    print(f"\nmean divergence of llama.cpp from float32: {theirs:.6f}, of the native kernels: {ours:.6f} ± {error:.6f}")
    assert ours <= theirs + error
