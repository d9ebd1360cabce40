"""Every instruction set stores keys and values in int8 with the bits of cache/storage.py."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from torch import Tensor

from speculant.cache import round_heads
from speculant.kernels import Code, Op, Pass, Type, address
from tests.native import SETS, needs_kernels, on

pytestmark = needs_kernels
KV_HEADS, ROWS, SLOTS = 3, 64, [9, 4, *range(10, 72)]


def numbers(dim: int) -> Tensor:
    """Return rows [rows, 2 KV_HEADS, dim] of keys and values: ordinary ones, and some of each awkward kind."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(ROWS, 2 * KV_HEADS, dim, generator=generator) * torch.logspace(-20, 20, ROWS).view(-1, 1, 1)
    x[1] = torch.randint(-254, 255, x[1].shape, generator=generator) / 2  # ties
    x[1, :, 0] = 127.0
    x[2], x[3, 0], x[3, 1], x[4] = 0.0, math.nan, -math.inf, 1e-41
    x[3, 2, -1] = math.inf
    return x


def stored(isa: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the storages of keys and values after a pass that stores these rows."""
    dim = x.shape[-1]
    keys, values = (torch.full((80, KV_HEADS, dim + 4), 77, dtype=torch.int8) for _ in range(2))
    slots, pointers = torch.tensor(SLOTS), [array("Q", [each.data_ptr()]) for each in (keys, values)]
    op = Op(code=Code.ROTATE, type=Type.INT8, heads=0, kv_heads=KV_HEADS, dim=dim, source=x.data_ptr())
    passed = Pass(
        rows=ROWS, block=16, groups=1, slots=slots.data_ptr(), keys=address(pointers[0]), values=address(pointers[1])
    )
    on(isa).run((Op * 1)(op), passed)
    return keys, values


@pytest.mark.parametrize("dim", [1, 6, 8, 12, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("isa", SETS)
def test_every_set_rounds_keys_and_values_alike(isa: str, dim: int) -> None:
    x = numbers(dim)
    for seen, wrote in zip(stored(isa, x.clone()), (x[:, :KV_HEADS], x[:, KV_HEADS:]), strict=True):
        expected = torch.full_like(seen, 77)
        expected[SLOTS] = round_heads(wrote)
        assert torch.equal(seen[..., :dim], expected[..., :dim])
        scales, own = (each[..., dim:].contiguous().view(torch.float32) for each in (seen, expected))
        torch.testing.assert_close(scales, own, rtol=0, atol=0, equal_nan=True)
