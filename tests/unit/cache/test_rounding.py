"""Keys and values in int8: the integers, their scales, and storages that hold them."""

from __future__ import annotations

import math

import pytest
import torch

from speculant.cache.base import CacheShape, Moves
from speculant.cache.storage import TensorStorage, read_heads, round_heads

CPU = torch.device("cpu")
NUMBERS = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(0))


def parts(x: list[float]) -> tuple[list[int], float]:
    """Return the integers and the scale of a head."""
    stored = round_heads(torch.tensor([x]))[0]
    return stored[:-4].tolist(), float(stored[-4:].clone().view(torch.float32))


def test_the_largest_number_is_127_and_ties_go_to_even() -> None:
    assert parts([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4]) == ([127, 0, 2, 2, 0, -2, 3], 1.0)
    assert parts([-2 * 127.0, 100.0]) == ([-127, 50], 2.0)


def test_zeros_have_the_scale_0() -> None:
    assert parts([0.0, -0.0, 0.0]) == ([0, 0, 0], 0.0)
    assert read_heads(round_heads(torch.zeros(2, 3)), torch.float32).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
    seen = read_heads(round_heads(x), torch.float32)
    assert seen[0].isnan().all()
    assert seen[1].isfinite().all()


@pytest.mark.parametrize("least", [1e-45, 1e-38, 1e-36])
def test_tiny_numbers_do_not_overflow(least: float) -> None:
    integers, scale = parts([least, 0.0])
    assert 0 <= integers[0] <= 127
    assert 0 < scale < 1e-37


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_are_within_half_a_step(dtype: torch.dtype) -> None:
    x = NUMBERS.to(dtype)
    seen = read_heads(round_heads(x), dtype)
    assert seen.dtype == dtype
    steps = x.float().abs().amax(-1, keepdim=True) / 127
    rounding = 2**-8 * x.float().abs() if dtype == torch.bfloat16 else 0
    assert ((seen.float() - x.float()).abs() <= 0.5001 * steps + rounding).all()
    assert (seen != x).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.int8, torch.float32, torch.bfloat16])
def test_a_storage_reads_what_it_rounded_and_moves_it(stored: torch.dtype, dtype: torch.dtype) -> None:
    shape = CacheShape(2, 2, 7, dtype, CPU, stored=stored)
    storage, x = TensorStorage(shape, 5, "lower the test's size."), NUMBERS.to(dtype)
    for layer in range(2):
        storage.write(layer, torch.arange(5), x + layer, -x)
    storage.move(Moves([4, 0], [0, 4]))
    order = [4, 1, 2, 3, 0]
    for layer in range(2):
        for seen, wrote in zip(storage.read(layer, slice(0, 5)), (x + layer, -x), strict=True):
            kept = read_heads(round_heads(wrote), dtype) if stored == torch.int8 else wrote.to(stored).to(dtype)
            assert seen.dtype == dtype
            assert torch.equal(seen, kept[order])
        keys, _ = storage.read(layer, torch.tensor([2, 0]))
        assert torch.equal(keys, storage.read(layer, slice(0, 5))[0][[2, 0]])


def test_bytes_count_the_scales() -> None:
    def bytes_per_token(stored: torch.dtype | None) -> int:
        return CacheShape(3, 2, 64, torch.bfloat16, CPU, stored=stored).bytes_per_token

    assert bytes_per_token(torch.int8) == 3 * 2 * 2 * (64 + 4)
    assert bytes_per_token(None) == bytes_per_token(torch.bfloat16) == 3 * 2 * 2 * 128
    assert bytes_per_token(torch.float32) == 2 * bytes_per_token(None)
    storage = TensorStorage(CacheShape(3, 2, 64, torch.bfloat16, CPU, stored=torch.int8), 10, "lower the test's size.")
    assert sum(part.nbytes for layer in range(3) for part in storage.layer(layer)) == 10 * bytes_per_token(torch.int8)
