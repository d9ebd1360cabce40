"""Integers in groups become rows of blocks that stand for the same numbers, in any order of columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.models import (
    Columns,
    InputGroups,
    Mapped,
    QuantizedBlocks,
    Rows,
    TensorMap,
    Transposed,
    WeightSource,
    as_blocks,
    as_floats,
    decode,
    layout_for,
    read_plain,
    stored_bytes,
    unpacked,
    why_no_halves,
)
from speculant.models.weights import scaled

N, K, SIZE = 5, 192, 64
RANDOM = np.random.default_rng(0)
BITS = {"q4_0": 4, "zero4": 4, "q8_0": 8, "zero8": 8}


def made(layout: str, groups: InputGroups, transposed: bool) -> tuple[QuantizedBlocks, Tensor]:
    """Return random blocks, and their numbers as the definition says."""
    bits = BITS[layout]
    q = RANDOM.integers(0, 2**bits, (N, K)).astype(np.uint8)
    zeros = RANDOM.integers(0, 2**bits, (N, groups.count)).astype(np.uint8)
    if layout.startswith("q"):
        zeros[:] = 2 ** (bits - 1)
    assert layout_for(bits, zeros) == layout
    scales = torch.from_numpy(RANDOM.standard_normal((N, groups.count))).half()
    expected = scales.float()[:, groups.of] * (
        torch.from_numpy(q).float() - torch.from_numpy(zeros).float()[:, groups.of]
    )
    assert torch.equal(as_floats(q, scales, zeros, bits, groups), expected)
    given = np.asfortranarray(q) if transposed else q
    return as_blocks(layout, given, scales, zeros, groups), expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("layout", BITS)
def test_blocks_stand_for_the_numbers(layout: str, ordered: bool, transposed: bool) -> None:
    groups = InputGroups.of_size(K, SIZE)
    if ordered:
        groups = InputGroups(RANDOM.permutation(groups.of), groups.count)
    blocks, expected = made(layout, groups, transposed)
    assert (blocks.layout, blocks.shape, blocks.order is not None) == (layout, (N, K), ordered)
    assert torch.equal(decode(blocks, torch.float32), expected)
    assert blocks.blocks.numel() == stored_bytes(layout.upper(), (N, K))


@pytest.mark.parametrize("at_once", [1, 2 * K, 3 * K + 1])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_few_rows_are_decoded_at_a_time(has_zeros: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = InputGroups.of_size(K, SIZE)
    q = RANDOM.integers(0, 16, (N, K)).astype(np.uint8)
    zeros = RANDOM.integers(0, 16, (N, groups.count)).astype(np.uint8) if has_zeros else None
    scales = torch.from_numpy(RANDOM.standard_normal((N, groups.count))).float()
    whole = as_floats(q, scales, zeros, 4, groups)
    monkeypatch.setattr(scaled, "DECODED_AT_ONCE", at_once)
    assert torch.equal(as_floats(q, scales, zeros, 4, groups), whole)


@pytest.mark.parametrize(
    ("size", "k", "why"),
    [(32, 96, ""), (64, 96, ""), (96, 96, ""), (48, 96, "groups have 48"), (64, 80, "rows have 80")],
)
def test_blocks_need_whole_groups(size: int, k: int, why: str) -> None:
    found = InputGroups.of_size(k, size).why_decoded
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        ([0.5, 2.0**-24], ""),
        ([float("inf")], ""),
        ([0.5, 1e-7], "float16 can't hold the scales"),
        ([70000.0], "float16 can't hold the scales"),
        ([float("nan")], "float16 can't hold the scales"),
        ([1e-7] + [0.5] * 99, "float16 can't hold the scales"),
        ([1e-7] + [0.5] * 100, "float16 can't hold a few of the scales"),
    ],
)
def test_float16_holds_some_scales(scales: list[float], why: str) -> None:
    found = why_no_halves(torch.tensor(scales))
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_words_hold_the_lowest_integer_first(bits: int, axis: int) -> None:
    words = torch.from_numpy(RANDOM.integers(-(2**31), 2**31, (3, 5)).astype(np.int32))
    found = unpacked(words, bits, axis)
    for place in np.ndindex(found.shape):
        word = list(place)
        word[axis] //= 32 // bits
        shift = place[axis] % (32 // bits) * bits
        assert found[place] == (int(words[tuple(word)]) >> shift) & (2**bits - 1)


@dataclass(frozen=True)
class OneMatrix(WeightSource):
    """A source of one matrix in blocks."""

    blocks: QuantizedBlocks
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def names(self) -> Collection[str]:
        return ["stored"]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.blocks.shape

    def kind(self, name: str) -> str:
        return self.blocks.layout.upper()

    def order(self, name: str) -> Tensor | None:
        return self.blocks.order

    def read(self, name: str) -> QuantizedBlocks:
        return self.blocks


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_keep_an_order_and_columns_are_decoded(ordered: bool) -> None:
    groups = InputGroups.of_size(K, SIZE)
    if ordered:
        groups = InputGroups(RANDOM.permutation(groups.of), groups.count)
    blocks, expected = made("zero4", groups, transposed=False)
    tensors = TensorMap((("rows", Rows("stored", 1, 3, 5)), ("columns", Columns("stored", 32, 64, K))))
    source = Mapped(OneMatrix(blocks), {"rows": (3, K), "columns": (N, 64)}, tensors)
    assert torch.equal(read_plain(source, "rows"), expected[1:4])
    assert torch.equal(read_plain(source, "columns"), expected[:, 32:96])
    assert (source.kind("rows"), source.kind("columns")) == ("ZERO4", "F32" if ordered else "ZERO4")
    assert (source.order("rows") is not None, source.order("columns") is not None) == (ordered, False)


def test_upright_matrices_are_not_transposed() -> None:
    tensors = TensorMap(
        (("a.{}.weight", Rows(Transposed("b.{}.weight"), 0, 1, 3)), ("c.weight", Transposed("d.weight")))
    )
    upright = tensors.upright(["b.2.weight"])
    assert upright.expression("a.2.weight") == Rows("b.2.weight", 0, 1, 3)
    assert upright.expression("a.1.weight") == tensors.expression("a.1.weight")
    assert upright.expression("c.weight") == Transposed("d.weight")
    assert TensorMap((("a", "b"),)).upright(["b"]) == TensorMap((("a", "b"),)), "nothing is transposed"
