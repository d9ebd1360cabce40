"""What tests of native kernels share: the instruction sets that are here, weights of every type, and layers of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.kernels import Activation, Code, Flag, Kernels, Op, Pass, Type, Weight, open_kernels, usable_sets
from speculant.models import linear
from tests import fp8, gguf_blocks

SETS = usable_sets()
PAIRED_SETS = ["avx512bf16", "amx"]  # they round rows to bfloat16 where they multiply them by bfloat16 weights
needs_kernels = pytest.mark.skipif(not SETS, reason="the native kernels are not built")
FLOATS = {
    Type.F32: torch.float32, Type.BF16: torch.bfloat16, Type.F16: torch.float16, Type.BF12: torch.bfloat16,
}  # fmt: skip


def on(isa: str = SETS[0] if SETS else "", threads: int = 2) -> Kernels:
    """Open the kernels of an instruction set."""
    found = open_kernels(isa, threads)
    assert found is not None
    return found


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Give the kernels of each instruction set in turn, on two threads."""
    return on(request.param)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normal numbers, the same for the same seed."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(type_: Type, k: int) -> int:
    """Return a number of inputs near k that a type can hold: whole blocks, or an odd number without blocks."""
    if type_ in FLOATS or type_ in (Type.INT8, Type.FP8):
        return k + 11
    return -(-k // gguf_blocks.block_weights(type_.name)) * gguf_blocks.block_weights(type_.name)


def rows_of(type_: Type, weight: Tensor) -> Tensor:
    """Return what a matrix is packed from: floats, or blocks that stand for about these weights."""
    if type_ in FLOATS:
        return weight.to(FLOATS[type_])
    if type_ == Type.INT8:
        return weight  # it is rounded when it is packed
    return fp8.encode(weight) if type_ == Type.FP8 else torch.from_numpy(gguf_blocks.encode(type_.name, weight.numpy()))


def held(type_: Type, rows: Tensor, k: int) -> Tensor:
    """Return the numbers [n, k] in float32 that the rows of a type stand for, all but those of INT8."""
    if type_ in FLOATS:
        return rows.float()
    return fp8.decode(rows, k) if type_ == Type.FP8 else torch.from_numpy(gguf_blocks.decode(type_.name, rows.numpy()))


def pack(kernels: Kernels, type_: Type, n: int, k: int, *seeds: int, extreme: float = 0.0) -> Weight:
    """Pack a random matrix, or two that are interleaved.

    Blocks have random bits; extreme: the share of their scales that are zero, subnormal or the largest ones.
    """

    def rows(seed: int) -> Tensor:
        if type_ in FLOATS or type_ in (Type.INT8, Type.FP8):
            return rows_of(type_, random(n, k, seed=seed))
        blocks = gguf_blocks.random_blocks(type_.name, n, k, np.random.default_rng(seed), extreme)
        return torch.from_numpy(blocks)

    return kernels.pack(type_, *map(rows, seeds or (0,)))


def run(
    kernels: Kernels, weight: Weight, x: Tensor, bias: Tensor | None = None, added: Tensor | None = None,
    flags: Flag = Flag.NONE,
) -> Tensor:  # fmt: skip
    """Return x weight^T (+ bias) (+ added), or the gated product of two matrices."""
    out = torch.full((len(x), weight.n), math.nan) if added is None else added.clone()
    flags, activation = flags | (Flag.NONE if added is None else Flag.ADD), Activation.NONE
    if Flag.GATED in flags:
        activation = Activation.SILU
    kernels.run((Op * 1)(linear(weight, x, out, bias, flags, activation=activation)), Pass(rows=len(x)))
    return out


def look_up(kernels: Kernels, table: Weight, tokens: Tensor | None = None) -> Tensor:
    """Return rows of a packed table, all of them unless tokens are named."""
    tokens = torch.arange(table.n) if tokens is None else tokens
    out = torch.full((len(tokens), table.k), math.nan)
    op = Op(code=Code.EMBED, type=table.type, n=table.k, k=table.n, weight=table.address, out=out.data_ptr())
    kernels.run((Op * 1)(op), Pass(rows=len(tokens), tokens=tokens.data_ptr()))
    return out


def bits(x: Tensor) -> Tensor:
    """Return the bits of floats."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two results have the same bits, but for those of a NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    numbers = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a[numbers]), bits(b[numbers]))


def error(found: Tensor, expected: Tensor) -> float:
    """Return the error of a result, relative to its size."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
