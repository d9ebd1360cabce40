"""Blocks on every instruction set: decoded exactly, multiplied as documented, with the same bits in any batch.

The truth is the decoding of tests/gguf_blocks.py and a product in float64. Rows of x are rounded to int8, in
groups of 32.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.kernels import BLOCK_TYPES, Flag, Kernels, Op, Pass, Type, Weight
from speculant.models import ROUNDINGS, linears
from tests.gguf_blocks import SCALES, block_bytes, block_weights, decode, encode, random_blocks
from tests.native import bits, error, kernels, look_up, needs_kernels, random, run, same

__all__ = ["kernels"]

pytestmark = needs_kernels
OTHERS = {
    "INT8",
    "FP8",
}  # rows that are no blocks of 32 integers: see test_native_packing.py and test_native_kernels.py
KINDS = [layout.upper() for layout in BLOCK_TYPES if layout.upper() not in OTHERS]
# Outputs, and groups of 32 inputs: one block, an odd number of groups, several superblocks, and enough for streams.
SHAPES = [(1, 1), (47, 1), (50, 3), (97, 9), (200, 33), (70, 131)]
GROUP = 32  # numbers of x that are rounded together
SMALL = (50, 9)


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


def inputs_of(kind: str, groups: int) -> int:
    """Return the number of inputs in the fewest whole blocks that hold these groups."""
    return -(-groups * GROUP // block_weights(kind)) * block_weights(kind)


def blocks_of(kind: str, shape: tuple[int, int], seed: int = 0, extreme: float = 0.0) -> np.ndarray:
    """Return random blocks of a shape: outputs and groups."""
    return random_blocks(kind, shape[0], inputs_of(kind, shape[1]), np.random.default_rng(seed), extreme)


def pack(kernels: Kernels, kind: str, blocks: np.ndarray, second: np.ndarray | None = None) -> Weight:
    """Pack a matrix of blocks, or two that are interleaved."""
    other = None if second is None else torch.from_numpy(second)
    return kernels.pack(BLOCK_TYPES[kind.lower()], torch.from_numpy(blocks), other)


def rounded(x: Tensor) -> Tensor:
    """Return x as layers of blocks round it, in float64: int8 times a scale per group."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, torch.tensor(127.0) / largest, 0)  # a number / a tensor is rounded twice
    seen = (groups * factors).round().double() * (largest / 127).double()
    return seen.view(len(x), -1)[:, : x.shape[1]]


def magnitudes(kind: str, blocks: np.ndarray) -> Tensor:
    """Return bounds of the sizes of weights before rounding: d q plus the minimum, both positive."""
    own = blocks.reshape(-1, block_bytes(kind)).copy()
    first, *others = SCALES.get(kind, [0])
    for place in others:  # minima; K types subtract them
        own[:, first + 1] &= 0x7F
        own[:, place + 1] = own[:, place + 1] | 0x80 if kind.endswith("K") else own[:, place + 1] & 0x7F
    return torch.from_numpy(decode(kind, own.reshape(blocks.shape))).double().abs()


def test_every_kind_has_a_type() -> None:
    expected = {*SCALES, "MXFP4"}
    assert {*KINDS} == expected
    assert {type_.name for type_ in BLOCK_TYPES.values()} == expected | OTHERS


@pytest.mark.covering(1)
@pytest.mark.parametrize("extreme", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_looked_up_rows_are_the_stored_numbers(
    kernels: Kernels, kind: str, shape: tuple[int, int], extreme: float
) -> None:
    blocks = blocks_of(kind, shape, extreme=extreme)
    found = look_up(kernels, pack(kernels, kind, blocks))
    assert torch.equal(bits(found), bits(torch.from_numpy(decode(kind, blocks))))


def test_every_exponent_of_mxfp4_is_decoded(kernels: Kernels) -> None:
    """The largest ones make infinite weights, the smallest ones subnormal weights."""
    blocks = random_blocks("MXFP4", 256, 64, np.random.default_rng(0))
    blocks[:, 0] = blocks[::-1, block_bytes("MXFP4")] = np.arange(256)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = torch.from_numpy(decode("MXFP4", blocks))
    assert bool(expected.isinf().any())
    assert same(look_up(kernels, pack(kernels, "MXFP4", blocks)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_blocks_are_decoded_exactly(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    blocks = blocks_of(kind, SMALL, extreme=0.3)
    expected = torch.from_numpy(decode(kind, blocks)).to(dtype)
    kernels.decode(Type[kind], torch.from_numpy(blocks), found := torch.empty_like(expected))
    assert torch.equal(found, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("extreme", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_product_of_rounded_rows(
    kernels: Kernels, kind: str, shape: tuple[int, int], extreme: float
) -> None:
    blocks = blocks_of(kind, shape, extreme=extreme)
    weight, seen = torch.from_numpy(decode(kind, blocks)).double(), rounded(x := random(13, inputs_of(kind, shape[1])))
    found, expected = run(kernels, pack(kernels, kind, blocks), x), seen @ weight.T
    assert bool(((found - expected).abs() <= 5e-7 * (seen.abs() @ magnitudes(kind, blocks).T) + 1e-37).all())
    assert error(found, expected) < 1e-5


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_near_the_product(kernels: Kernels, kind: str) -> None:
    blocks = blocks_of(kind, (64, 32))
    weight, x = torch.from_numpy(decode(kind, blocks)), random(16, 1024)
    rounding = error(run(kernels, pack(kernels, kind, blocks), x), x.double() @ weight.double().T)
    assert 0.002 < rounding < 0.007


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_size_are_rounded_alike(kernels: Kernels, kind: str) -> None:
    """Groups of one row differ by powers of two, which change no rounding; a group of zeros adds nothing."""
    blocks, x = blocks_of(kind, (64, 32)), random(3, 1024)
    powers = 2.0 ** torch.arange(-60, 68, 4).repeat_interleave(GROUP)
    powers[GROUP : 2 * GROUP] = 0
    weight = torch.from_numpy(decode(kind, blocks)).double()
    found = run(kernels, pack(kernels, kind, blocks), x * powers)
    expected = rounded(x) * powers @ weight.T
    assert error(found, expected) < 1e-5


def loud_rows() -> Tensor:
    """Return normal rows of 2,048 numbers, one of which is 100."""
    x = random(16, 2048)
    x[:, 777] = 100.0
    return x


def loud_error(kernels: Kernels, packed: Weight) -> float:
    """Return the error of a product of rows with a loud number, relative to the product without that number."""
    x, weight = loud_rows(), look_up(kernels, packed).double()
    others = x.double()
    others[:, 777] = 0
    difference = run(kernels, packed, x) - x.double() @ weight.T
    return float(difference.norm() / (others @ weight.T).norm())


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loud_number_spoils_its_group_alone(kernels: Kernels, kind: str) -> None:
    """With one scale for the whole row, the error would be 0.23."""
    weights = random(96, 2048, seed=1).numpy()
    assert 0.02 < loud_error(kernels, pack(kernels, kind, encode(kind, weights))) < 0.035


@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_a_loud_number_spoils_its_group_of_rounded_weights(kernels: Kernels, quantization: str) -> None:
    type_ = ROUNDINGS[quantization].most
    assert 0.02 < loud_error(kernels, kernels.pack(type_, random(96, 2048, seed=1))) < 0.035


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
def test_streams_change_no_bit(kernels: Kernels, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, x = blocks_of(kind, (50, 128)), random(9, inputs_of(kind, 128))
    streams, found, layouts = ctypes.c_int64.in_dll(kernels.library, "sp_group_streams"), [], []
    for number in (1, 8):
        monkeypatch.setattr(streams, "value", number)
        packed = pack(kernels, kind, blocks)
        layouts.append(packed.memory)
        found.append((run(kernels, packed, x), look_up(kernels, packed)))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert len(layouts[0]) != len(layouts[1]) or not torch.equal(*layouts)


@pytest.mark.parametrize(("kind", "same_as", "zero"), [("ZERO4", "Q4_0", 8), ("ZERO8", "Q8_0", 128)])
def test_a_zero_in_the_middle_changes_no_bit(
    kernels: Kernels, kind: str, same_as: str, zero: int, shape: tuple[int, int]
) -> None:
    """Integers of Q8_0 are signed; those of ZERO8 are not."""
    signed = blocks_of(same_as, shape, extreme=0.1)
    own = signed.reshape(-1, block_bytes(same_as))
    integers = own[:, 2:] ^ (128 if zero == 128 else 0)
    blocks = np.concatenate([own[:, :2], np.full((len(own), 1), zero, np.uint8), integers], axis=1)
    first, second = pack(kernels, same_as, signed), pack(kernels, kind, blocks.reshape(shape[0], -1))
    x = random(21, inputs_of(kind, shape[1]))
    x[3:5] = 0
    assert same(run(kernels, first, x), run(kernels, second, x))


@pytest.mark.parametrize("zero", [0, 255])
@pytest.mark.parametrize("kind", ["ZERO4", "ZERO8"])
def test_extreme_zeros_and_integers_are_summed_exactly(kernels: Kernels, kind: str, zero: int) -> None:
    """All products have the largest size, so that a sum that saturates shows."""
    blocks = np.full((50, 9, block_bytes(kind)), 255, np.uint8)
    blocks[:, :, :2], blocks[:, :, 2] = np.array([1.0], np.float16).view(np.uint8), zero
    blocks[::3, :, 3:] = 0
    x = torch.ones(5, 9 * GROUP)
    x[1], x[2, ::2], x[3, 1::3] = -1, -1, 0.5
    weight = torch.from_numpy(decode(kind, blocks.reshape(50, -1))).double()
    assert error(run(kernels, pack(kernels, kind, blocks.reshape(50, -1)), x), rounded(x) @ weight.T) < 1e-6


@pytest.mark.covering(1)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "INT8"])
def test_columns_multiply_the_inputs_that_their_order_names(kernels: Kernels, kind: str, gated: bool) -> None:
    """The results have the bits of rows whose numbers are sorted before; rows depend on themselves alone."""
    if kind == "INT8":
        weight = kernels.pack(Type.INT8, random(70, 1000, seed=1), random(70, 1000, seed=2) if gated else None)
    else:
        blocks = [blocks_of(kind, (70, 131), seed) for seed in ((1, 2) if gated else (1,))]
        weight = pack(kernels, kind, *blocks)
    order = torch.randperm(weight.k, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    flags, x = {"flags": Flag.GATED} if gated else {}, random(300, weight.k)
    ordered, expected = replace(weight, order=order), run(kernels, weight, x[:, order.long()], **flags)
    assert torch.equal(run(kernels, ordered, x, **flags), expected)
    for first, rows in ((0, 1), (7, 2), (31, 5), (100, 9)):
        part = slice(first, first + rows)
        assert torch.equal(run(kernels, ordered, x[part], **flags), expected[part])


def test_scales_whose_product_overflows_give_finite_results(kernels: Kernels) -> None:
    block = np.zeros(34, np.uint8)
    block[:2] = np.array([65504], np.float16).view(np.uint8)
    block[2:4] = np.array([1, -1], np.int8).view(np.uint8)
    x = torch.zeros(1, 32)
    x[0, :2] = 3e38
    assert run(kernels, pack(kernels, "Q8_0", block[None]), x).item() == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 2e-38, 1e-30])
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_numbers_are_multiplied(kernels: Kernels, kind: str, size: float) -> None:
    """127 / size may overflow. Results may lose as much as float32 flushes to zero, and no more."""
    blocks = blocks_of(kind, SMALL)
    x = size * random(4, inputs_of(kind, SMALL[1])).clamp(-1, 1)
    found, exact = run(kernels, pack(kernels, kind, blocks), x), torch.from_numpy(decode(kind, blocks)).double()
    lost = (0.01 * size + 1.2e-38) * exact.abs().sum(1)
    assert bool(((found - x.double() @ exact.T).abs() <= lost + 1.2e-38).all())


@pytest.mark.covering(1)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", SCALES)
def test_a_damaged_scale_spoils_its_output_alone(kernels: Kernels, kind: str, bad: float) -> None:
    shape = (50, 17)
    blocks, x = blocks_of(kind, shape), random(9, inputs_of(kind, shape[1]))
    clean = run(kernels, pack(kernels, kind, blocks), x)
    damaged = blocks.copy()
    places = [block_bytes(kind) + place for place in SCALES[kind]]  # of the second block
    for output, place in zip((7, 31), (places[0], places[-1]), strict=True):
        damaged[output, place : place + 2] = np.array([bad], np.float16).view(np.uint8)
    packed = pack(kernels, kind, damaged)
    found, others = run(kernels, packed, x), [output for output in range(50) if output not in (7, 31)]
    assert torch.equal(found[:, others], clean[:, others])
    assert not bool(found[:, [7, 31]].isfinite().any())
    with np.errstate(invalid="ignore"):
        assert same(look_up(kernels, packed), torch.from_numpy(decode(kind, damaged)))


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_matrices_of_all_types_write_columns_of_one_output(kernels: Kernels, rows: int, added: bool) -> None:
    x, floats = random(rows, 512), random(37, 512, seed=1)
    weights = [pack(kernels, kind, blocks_of(kind, (50, 16))) for kind in KINDS]
    weights += [kernels.pack(type_, floats) for type_ in (Type.F32, Type.BF16, Type.BF12, Type.INT8)]
    weights.append(kernels.pack(Type.F16, floats.half()))
    ends = np.cumsum([weight.n for weight in weights])
    out, bias = torch.full((rows, ends[-1] + 3), 0.5), random(ends[-1], seed=2)
    ops = linears(weights, x, out, bias, Flag.ADD if added else Flag.NONE)
    kernels.run((Op * len(weights))(*ops), Pass(rows=rows))
    for weight, end in zip(weights, ends, strict=True):
        part = slice(end - weight.n, end)
        before = torch.full((rows, weight.n), 0.5) if added else None
        assert torch.equal(out[:, part], run(kernels, weight, x, bias[part], before)), weight.type.name
    assert bool((out[:, ends[-1] :] == 0.5).all()), "other columns stay"


F16_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)


@pytest.mark.covering(1)
@pytest.mark.parametrize("depth", [1, 33, 100, 2101])
@pytest.mark.parametrize("rows", [1, 5, 8, 300])
def test_float16_weights_are_the_same_numbers_in_float32(kernels: Kernels, rows: int, depth: int) -> None:
    halves, x = random(67, depth, seed=1).half(), random(rows, depth)
    halves[3:9] *= 1e-6  # subnormal
    narrow, wide = kernels.pack(Type.F16, halves), kernels.pack(Type.F32, halves.float())
    bias, added = random(67, seed=2), random(rows, 67, seed=3)
    assert torch.equal(run(kernels, narrow, x, bias, added), run(kernels, wide, x, bias, added))
    gated = [
        kernels.pack(type_, matrix, matrix.flip(0))
        for type_, matrix in ((Type.F16, halves), (Type.F32, halves.float()))
    ]
    assert torch.equal(*(run(kernels, weight, x, flags=Flag.GATED) for weight in gated))


def test_every_number_of_float16_is_widened_exactly(kernels: Kernels) -> None:
    every = F16_BITS.view(torch.float16).view(256, 256)
    assert same(look_up(kernels, kernels.pack(Type.F16, every)), every.float())
