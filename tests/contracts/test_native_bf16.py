"""Pairs of bfloat16 are multiplied as the instruction's manual has it: on AVX512-BF16, or on a model of it.

The model (`make models`) is the manual's bit for bit. A processor may round otherwise: its rows are as
invariant and as near to the reference (test_native_kernels.py). Without either, everything is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculant.kernels import Type, usable_sets
from tests.contracts.test_native_kernels import run_linear
from tests.native import bits, on, random

SET = "avx512bf16"
PROCESSORS = Path("/proc/cpuinfo")
IS_HERE = PROCESSORS.is_file() and "avx512_bf16" in PROCESSORS.read_text()
pytestmark = pytest.mark.skipif(SET not in usable_sets(), reason="neither the instruction nor a model of it is here")
LEAST_NORMAL = 2.0**-126


def flush(x: Tensor) -> Tensor:
    """Return x with zeros, of the same sign, for subnormal numbers of float32."""
    return torch.where(x.abs() < LEAST_NORMAL, 0.0 * x, x)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c rounded once, to float32; a and b are bfloat16's values, c float32's.

    Float64 holds the product. It need not hold the sum, but does so wherever that is near the middle of two float32:
    the product's 16 bits and c's 24 then all lie within its 53. So the sum's own rounding never decides the second one.
    """
    return (a.double() * b.double() + c.double()).float()


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [t, k] weight [n, k]^T: one accumulator per output takes k by pairs, the second of each pair first."""
    x, weight = (torch.nn.functional.pad(values, (0, values.shape[1] % 2)) for values in (x, weight))
    x, weight = flush(x.bfloat16().float()), flush(weight.bfloat16().float())
    sums = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 2):
        for k in (first + 1, first):
            sums = flush(multiply_add(x[:, k, None], weight[:, k], sums))
    return sums


@pytest.mark.parametrize(("rows", "k"), [(1, 200), (5, 33), (13, 514)])
def test_a_layer_is_exact_where_nothing_is_rounded(rows: int, k: int) -> None:
    kernels, generator = on(SET, 1), torch.Generator().manual_seed(k)
    x, weight = (torch.randint(-90, 91, (size, k), generator=generator).float() for size in (rows, 70))
    assert torch.equal(run_linear(kernels, Type.BF16, x, weight), x @ weight.T)


@pytest.mark.covering(1)
@pytest.mark.skipif(IS_HERE, reason="the processor has the instruction, and is not asked how it rounds")
@pytest.mark.parametrize(
    ("x_scale", "weight_scale"),
    [(1.0, 1.0), (1e-19, 1e-19), (1e-38, 1.0), (1.0, 1e-38), (1e-38, 1e30), (3e19, 3e18)],
    ids=["usual", "subnormal sums", "subnormal inputs", "subnormal weights", "subnormal inputs matter", "overflow"],
)
@pytest.mark.parametrize(("rows", "k"), [(1, 200), (4, 33), (5, 64), (12, 1), (13, 514), (25, 1031)])
def test_a_layer_is_the_documented_instruction(rows: int, k: int, x_scale: float, weight_scale: float) -> None:
    kernels = on(SET, 1)
    x, weight = random(rows, k, scale=x_scale), random(70, k, seed=1, scale=weight_scale).bfloat16()
    expected, seen = layer(x, weight), run_linear(kernels, Type.BF16, x, weight)
    numbers = ~expected.isnan()
    assert torch.equal(seen.isnan(), expected.isnan())
    assert torch.equal(bits(seen)[numbers], bits(expected)[numbers])
