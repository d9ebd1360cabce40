"""The functions that models compute tables with, against the C library's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speculant.models import cosines_and_sines, exponential, log_of, logarithm, powers

WIDE = torch.float64


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error, as a share of the number."""
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-300)).max())


def of_each(function: Callable[[float], float], x: Tensor) -> Tensor:
    return torch.tensor([function(each) for each in x.tolist()], dtype=WIDE)


def test_angles_of_any_size_have_their_cosines_and_sines() -> None:
    angles = torch.cat([torch.linspace(0, most, 5_003) for most in (1, 40, 1e4, 1e6, 3e7)])
    for found, function in zip(cosines_and_sines(angles), (math.cos, math.sin), strict=True):
        assert found.dtype == torch.float32
        assert float((found - of_each(function, angles)).abs().max()) < 2**-24 + 1e-15


def test_parts_of_many_angles_are_computed_alike() -> None:
    angles = torch.linspace(0, 300, 30_000).view(100, 3, 100)
    for all_of_them, some in zip(cosines_and_sines(angles), cosines_and_sines(angles[7:9, 1]), strict=True):
        assert all_of_them.shape == angles.shape
        assert torch.equal(all_of_them[7:9, 1], some)


def test_exponentials_and_logarithms() -> None:
    x = torch.linspace(-700, 700, 9_001, dtype=WIDE)
    assert error(exponential(x), of_each(math.exp, x)) < 5e-16
    sizes = torch.logspace(-300, 300, 9_001, dtype=WIDE)
    assert error(logarithm(sizes), of_each(math.log, sizes)) < 5e-16
    assert log_of(1.0) == 0.0


@pytest.mark.parametrize("x", [0.0, -1.0, math.inf, math.nan, 1e-310])
def test_logarithms_of_unusual_numbers_are_those_of_torch(x: float) -> None:
    found, expected = logarithm(torch.tensor(x, dtype=WIDE)), torch.tensor(x, dtype=WIDE).log()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_powers() -> None:
    exponents = torch.arange(0, 128, 2) / 128
    expected = torch.tensor([10_000.0**each for each in exponents.tolist()], dtype=WIDE)
    assert error(powers(10_000.0, exponents), expected) < 5e-15
    assert powers(torch.full((64,), 10_000.0), exponents).tolist() == powers(10_000.0, exponents).tolist()
