"""Blocks packed in parts equal blocks packed at once, and take at most 3% more memory than their file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.kernels import BLOCK_TYPES, Arena, Flag, Kernels, Lane, Packer, Read, allocate, packing
from tests.contracts.test_native_blocks import (
    KINDS,
    blocks_of,
    inputs_of,
    pack,
)
from tests.gguf_blocks import block_weights, row_bytes
from tests.native import kernels, needs_kernels, random, run

__all__ = ["kernels"]
pytestmark = needs_kernels
SPLITS = [[1], [1, 2, 3], [5, 200, 7], [63, 1, 64], [31, 33, 100, 28]]


def reads(blocks: np.ndarray, split: Sequence[int]) -> list[Read]:
    """Return functions that read the parts of a matrix."""
    return [partial(Tensor.clone, part) for part in torch.from_numpy(blocks).split([*split])]


@pytest.mark.covering(1)
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packing_in_parts_equals_whole(
    kernels: Kernels, kind: str, split: list[int], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes are interleaved panel by panel: panel p of lane i is panel p * lanes + i."""
    monkeypatch.setattr(packing, "CHUNK_BYTES", 1)  # so that one part is several chunks
    matrices = [blocks_of(kind, (sum(split), 9), seed, extreme=0.1) for seed in range(lanes)]
    type_, n, k = BLOCK_TYPES[kind.lower()], sum(split), inputs_of(kind, 9)
    packer = Packer(kernels, torch.bfloat16, Arena(kernels.touch))
    found = packer.pack(type_, n, k, [reads(matrix, split) for matrix in matrices])
    panel = kernels.packed_bytes(type_, 1, k)
    each = found.memory.view(-1, lanes, panel)
    for lane, matrix in enumerate(matrices):
        assert torch.equal(each[:, lane], pack(kernels, kind, matrix).memory.view(-1, panel)), lane


@pytest.mark.parametrize("kind", KINDS)
def test_two_matrices_are_packed_as_two_lanes(kernels: Kernels, kind: str) -> None:
    gate, up = (blocks_of(kind, (100, 9), seed) for seed in (1, 2))
    type_, k, x = BLOCK_TYPES[kind.lower()], inputs_of(kind, 9), random(5, inputs_of(kind, 9))
    weight = allocate(kernels, type_, 100, k, 2)
    for index, matrix in enumerate((gate, up)):
        lane = Lane(kernels, weight, torch.float32, index, 2)
        lane.write(torch.from_numpy(matrix))
        lane.close()
    at_once = pack(kernels, kind, gate, up)
    assert torch.equal(weight.memory, at_once.memory)
    assert torch.equal(run(kernels, weight, x, flags=Flag.GATED), run(kernels, at_once, x, flags=Flag.GATED))


# hidden, intermediate, queries, keys, vocabulary, layers
MODELS = {
    "SmolLM2-135M": (576, 1536, 576, 192, 49152, 30),
    "gemma-3-270m": (640, 2048, 1024, 256, 262144, 18),
    "Llama-3.2-1B": (2048, 8192, 2048, 512, 128256, 16),
    "Qwen3-0.6B": (1024, 3072, 2048, 1024, 151936, 28),
    "Llama-3.1-8B": (4096, 14336, 4096, 1024, 128256, 32),
}


def matrices(model: str) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes [n, k] of a model's matrices, and how many there are of each."""
    hidden, inner, queries, keys, vocabulary, layers = MODELS[model]
    yield queries, hidden, layers
    yield keys, hidden, 2 * layers
    yield hidden, queries, layers
    yield inner, hidden, 2 * layers
    yield hidden, inner, layers
    yield vocabulary, hidden, 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_models_are_hardly_larger_than_files(kernels: Kernels, kind: str, model: str) -> None:
    """A matrix whose rows are no whole blocks is stored as Q8_0, as llama.cpp does it."""
    stored = packed = 0
    for n, k, count in matrices(model):
        own = kind if k % block_weights(kind) == 0 else "Q8_0"
        stored += count * n * row_bytes(own, k)
        packed += count * kernels.packed_bytes(BLOCK_TYPES[own.lower()], n, k)
    assert stored <= packed <= 1.03 * stored
