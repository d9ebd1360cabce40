"""bfloat16 weights in 12 bits give the bits of plain ones: every instruction set, number of rows, shape and value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.kernels import INDEX_BYTES, Kernels, Type, Weight, panel_rows
from tests.examples import examples
from tests.native import SETS, bits, kernels, look_up, needs_kernels, on, random, run, same

__all__ = ["kernels"]

pytestmark = needs_kernels
DEEP = 2101  # in streams on every instruction set
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 64, 127, 128, 129, 300)
LAYERS = (*ROWS[:9], 300)


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    """Return weights whose exponents are those of a trained matrix: few are rare."""
    return random(n, k, seed=seed, scale=0.02).bfloat16()


def of_bits(bits: Tensor) -> Tensor:
    """Return the bfloat16 numbers that have these bits [n, k]."""
    return bits.to(torch.int16).view(torch.bfloat16)


def share_coded(kernels: Kernels, weight: Weight) -> float:
    """Return the share of panels that are coded, by the matrix's index."""
    panels = -(-weight.n // panel_rows(kernels))
    entries = weight.memory[: panels * INDEX_BYTES].view(torch.int64).view(panels, -1)
    return float((entries[:, 1] != 0).float().mean())


def check(kernels: Kernels, matrix: Tensor, rows: tuple[int, ...] = LAYERS) -> Weight:
    """Compare a layer's results and looked-up rows with those of plain weights; return the coded weight."""
    plain, coded = kernels.pack(Type.BF16, matrix), kernels.pack(Type.BF12, matrix)
    x = random(max(rows), matrix.shape[1], seed=9)
    for count in rows:
        own = x[:count].contiguous()
        assert same(run(kernels, coded, own), run(kernels, plain, own)), count
        added = torch.full((count, len(matrix)), 0.5)
        assert same(run(kernels, coded, own, None, added), run(kernels, plain, own, None, added)), count
    assert torch.equal(bits(look_up(kernels, coded)), bits(look_up(kernels, plain)))
    return coded


@pytest.mark.parametrize("k", [DEEP, 2048])
def test_coded_layer_is_plain_for_all_rows(kernels: Kernels, k: int) -> None:
    matrix = weights(101, k)
    coded = check(kernels, matrix, ROWS)
    assert share_coded(kernels, coded) == 1
    assert coded.memory.numel() < 0.8 * kernels.pack(Type.BF16, matrix).memory.numel()


@settings(max_examples=examples(25))
@given(rows=st.integers(1, 40), n=st.integers(1, 130), k=st.integers(1, 300), seed=st.integers(0, 99))
@pytest.mark.parametrize("isa", SETS)
def test_coded_layer_is_plain_for_odd_shapes(isa: str, rows: int, n: int, k: int, seed: int) -> None:
    check(on(isa), weights(n, k, seed), (rows,))


@pytest.mark.covering(1)
@pytest.mark.parametrize("k", [64, 333, DEEP])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-40, -1e-40, 1e-45, 0.0, -0.0, 3.3e38])
def test_coded_layer_keeps_special_weights(kernels: Kernels, value: float, k: int) -> None:
    matrix = weights(70, k)
    matrix[0, 0] = matrix[3, k // 2] = matrix[69, k - 1] = value
    assert share_coded(kernels, check(kernels, matrix)) == 1


def test_all_escapes_stay_plain(kernels: Kernels) -> None:
    """Every pattern of 16 bits is there, each as often: nothing is common."""
    matrix = of_bits(
        torch.randperm(2**16, generator=torch.Generator().manual_seed(1))[: 96 * 640].view(96, 640) - 2**15
    )
    coded, plain = check(kernels, matrix), kernels.pack(Type.BF16, matrix)
    assert share_coded(kernels, coded) == 0
    assert coded.memory.numel() <= plain.memory.numel() + 64 * (96 // panel_rows(kernels) + 1)


def test_panels_are_coded_where_they_can_be(kernels: Kernels) -> None:
    """One panel has common exponents alone, another all of them."""
    rows = panel_rows(kernels)
    wild = of_bits(torch.randint(-(2**15), 2**15, (rows, 500), generator=torch.Generator().manual_seed(2)))
    matrix = torch.cat([weights(rows, 500), wild, weights(rows, 500, 1)])
    assert share_coded(kernels, check(kernels, matrix)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("num_high", [1, 15, 16, 17])
def test_tables_hold_fifteen_high_bytes(kernels: Kernels, num_high: int) -> None:
    """Further ones are escapes: here a few weights, in the first and the last steps."""
    matrix = torch.randint(0, 15, (panel_rows(kernels), 400), generator=torch.Generator().manual_seed(3))
    matrix = matrix.clamp(max=num_high - 1)
    for extra in range(15, num_high):
        matrix[extra % 3 :: 9, [0, 1, 399]] = extra
    low = torch.randint(0, 256, matrix.shape, generator=torch.Generator().manual_seed(4))
    bits = (matrix + 0x30) * 256 + low
    assert share_coded(kernels, check(kernels, of_bits(bits))) == 1


def test_neighbouring_escapes_are_kept(kernels: Kernels) -> None:
    """A whole step of escapes, and the same place in every block."""
    matrix = weights(panel_rows(kernels), 2048)
    matrix[:, 1000] = 1e30
    matrix[5, ::16] = -1e-30
    assert share_coded(kernels, check(kernels, matrix)) == 1
