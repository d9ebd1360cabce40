"""A matrix that is packed as its rows are read has the bytes of one that is packed whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant.kernels import Kernels, Lane, Type, Weight, allocate, packing, panel_rows
from tests import fp8
from tests.native import kernels, look_up, needs_kernels, random

__all__ = ["kernels"]

pytestmark = needs_kernels
SPLITS = [[1], [1, 2, 3], [5, 200, 7], [63, 1, 64], [31, 33, 100, 28]]
PACKED = [
    Type.F32,
    Type.BF16,
    Type.INT8,
    Type.Q4_0,
    Type.Q4_K,
]  # that floats are packed as; coded panels are made of packed ones


def random_rows(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return random(n, k, seed=seed).to(dtype)


def blank(kernels: Kernels, type_: Type, like: Tensor, lanes: int = 1) -> Weight:
    """Allocate a packed matrix, filled so that bytes which nothing writes are equal."""
    packed = allocate(kernels, type_, *like.shape, lanes)
    packed.memory.fill_(0xAA)
    return packed


def pack_whole(kernels: Kernels, type_: Type, *matrices: Tensor) -> Tensor:
    """Pack matrices in turn, each in one call."""
    packed = blank(kernels, type_, matrices[0], len(matrices))
    for index, matrix in enumerate(matrices):
        offset = index * kernels.packed_bytes(type_, 1, matrix.shape[1])
        kernels.pack_panels(type_, matrix, packed.address + offset, len(matrices))
    return packed.memory


def pack_parts(
    kernels: Kernels, type_: Type, dtype: torch.dtype, matrices: Sequence[Tensor], split: list[int]
) -> Tensor:
    """Pack matrices in turn, each in parts."""
    packed = blank(kernels, type_, matrices[0], len(matrices))
    for index, matrix in enumerate(matrices):
        lane = Lane(kernels, packed, dtype, index, len(matrices))
        for part in matrix.split(split):
            lane.write(part)
        lane.close()
    return packed.memory


@pytest.mark.covering(1)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("type_", PACKED)
def test_packing_in_parts_equals_whole(
    kernels: Kernels, type_: Type, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", 1)  # so that one part is several chunks
    matrix = random_rows(sum(split), 130, torch.bfloat16)
    expected = pack_whole(kernels, type_, matrix)
    assert torch.equal(pack_parts(kernels, type_, torch.bfloat16, [matrix], split), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("type_", PACKED)
@pytest.mark.parametrize("stored", [torch.float16, torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_rounds_to_the_models_type(
    kernels: Kernels, type_: Type, stored: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", 1)
    matrix = random_rows(333, 72, stored)
    expected = pack_whole(kernels, type_, matrix.to(dtype))
    assert torch.equal(pack_parts(kernels, type_, dtype, [matrix], [200, 133]), expected)


@pytest.mark.parametrize("type_", PACKED)
@pytest.mark.parametrize("n", [1, 50, 64, 200])
def test_packing_in_turn_equals_whole(kernels: Kernels, type_: Type, n: int) -> None:
    gate, up = (random_rows(n, 72, torch.float32, seed) for seed in (1, 2))
    expected = pack_whole(kernels, type_, gate, up)
    assert torch.equal(pack_parts(kernels, type_, torch.float32, [gate, up], [n]), expected)


def test_panel_rows_are_what_the_library_says(kernels: Kernels) -> None:
    rows = panel_rows(kernels)
    assert rows > 1
    for type_ in PACKED:
        one = kernels.packed_bytes(type_, 1, 72)
        assert kernels.packed_bytes(type_, rows, 72) == one
        assert kernels.packed_bytes(type_, rows + 1, 72) == 2 * one


@pytest.mark.parametrize("k", [1, 31, 100, 2101])
def test_rows_of_int8_keep_their_scales(kernels: Kernels, k: int) -> None:
    """With a scale of 1 they are packed as the same numbers in float32 are; 96 rows fill panels of all sets."""
    numbers = torch.randint(-127, 128, (96, k), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    numbers[:, 0] = 127
    ones = torch.ones(96, 1)
    rows = torch.cat((ones.view(torch.uint8), numbers.view(torch.uint8)), dim=1)
    packed = kernels.pack(Type.INT8, rows)
    assert (packed.n, packed.k) == (96, k)
    assert torch.equal(packed.memory, kernels.pack(Type.INT8, numbers.float()).memory)
    rows[:, :4] = scales = torch.full((96, 1), 0.0371).view(torch.uint8)
    numbers[3, 0], rows[3, 4] = -128, 128
    found = look_up(kernels, kernels.pack(Type.INT8, rows))
    assert torch.equal(found, scales.view(torch.float32) * numbers.float())


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_rows_of_e4m3_are_packed_in_parts(kernels: Kernels, split: list[int]) -> None:
    rows = fp8.encode(random_rows(sum(split), 300, torch.float32))
    lane = Lane(kernels, packed := allocate(kernels, Type.FP8, sum(split), 300), torch.bfloat16)
    for part in rows.split(split):
        lane.write(part)
    lane.close()
    assert torch.equal(packed.memory, kernels.pack(Type.FP8, rows).memory)


@pytest.mark.parametrize("k", [30, 31, 32, 34, 63, 64, 130, 2048, 2050])
@pytest.mark.parametrize("n", [1, 47, 48, 100, 200])
def test_numbers_are_moved_as_they_are(kernels: Kernels, n: int, k: int) -> None:
    """Whole panels of bfloat16 are transposed by vectors; their float32 is packed number by number."""
    rows = random_rows(n, k, torch.bfloat16)
    assert torch.equal(pack_whole(kernels, Type.BF16, rows), pack_whole(kernels, Type.BF16, rows.float()))
