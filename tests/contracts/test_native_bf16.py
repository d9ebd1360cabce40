"""Pairs of bfloat16 are multiplied as the instruction of a set does it: on a processor with it, or on a model of it.

The models (`make models`) are Intel's manual bit for bit. AVX512-BF16 may round otherwise on a processor: its rows are
as invariant and as near to the reference (test_native_kernels.py). AMX was seen to follow the manual, and is compared
with it wherever it is. A set that is not here, nor a model of it, is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculant.kernels import Type
from tests.contracts.test_native_kernels import run_linear
from tests.native import PAIRED_SETS, SETS, bits, on, random, run

PROCESSORS = Path("/proc/cpuinfo")
IS_HERE = PROCESSORS.is_file() and "avx512_bf16" in PROCESSORS.read_text()
HERE = [isa for isa in PAIRED_SETS if isa in SETS]
pytestmark = pytest.mark.skipif(not HERE, reason="neither the instructions nor models of them are here")
LEAST_NORMAL = 2.0**-126
BLOCK = 32  # numbers of k that a tile takes at a time


def flush(x: Tensor) -> Tensor:
    """Return x with zeros, of the same sign, for subnormal numbers of float32."""
    return torch.where(x.abs() < LEAST_NORMAL, 0.0 * x, x)


def exact_sum(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c in float64; a and b are bfloat16's values, c float32's.

    Float64 holds the product. It need not hold the sum, but does so wherever that is near the middle of two float32:
    the product's 16 bits and c's 24 then all lie within its 53. So the sum's own rounding never decides the second one.
    """
    return a.double() * b.double() + c.double()


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c rounded once, to float32."""
    return exact_sum(a, b, c).float()


def rounded_and_flushed(exact: Tensor) -> Tensor:
    """Return float32 for float64, with zeros for numbers that are below the normal ones once rounded to 24 bits."""
    is_tiny = (exact * 2.0**64).float().abs() < LEAST_NORMAL * 2.0**64
    return torch.where(is_tiny, torch.zeros_like(exact).copysign(exact), exact).float()


def factors(x: Tensor, weight: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Return both in bfloat16's values without subnormal ones, with zeros up to a multiple of k."""
    x, weight = (torch.nn.functional.pad(values, (0, -values.shape[1] % multiple)) for values in (x, weight))
    return flush(x.bfloat16().float()), flush(weight.bfloat16().float())


def accumulated(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [t, k] weight [n, k]^T by AVX512-BF16: a sum takes k by pairs, the second of each pair first."""
    x, weight = factors(x, weight, 2)
    sums = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 2):
        for k in (first + 1, first):
            sums = flush(multiply_add(x[:, k, None], weight[:, k], sums))
    return sums


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """Return the same by AMX: in each block of k, a chain of even ones and one of odd ones, whose total is added."""
    x, weight = factors(x, weight, BLOCK)
    sums = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], BLOCK):
        chains = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for k in range(first, first + BLOCK):
            chains[k % 2] = rounded_and_flushed(exact_sum(x[:, k, None], weight[:, k], chains[k % 2]))
        total = rounded_and_flushed(chains[0].double() + chains[1].double())
        sums = rounded_and_flushed(sums.double() + total.double())
    return sums


LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"avx512bf16": accumulated, "amx": tiled}
DOCUMENTED = [
    isa for isa in HERE if isa == "amx" or not IS_HERE
]  # a processor with AVX512-BF16 is not asked how it rounds


def assert_documented(isa: str, x: Tensor, weight: Tensor) -> None:
    """Compare both types of a set with the manual."""
    expected = LAYERS[isa](x, weight)
    numbers = ~expected.isnan()
    for type_ in (Type.BF16, Type.BF12):
        seen = run_linear(on(isa, 1), type_, x, weight)
        assert torch.equal(seen.isnan(), expected.isnan())
        assert torch.equal(bits(seen)[numbers], bits(expected)[numbers])


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize(("rows", "k"), [(1, 200), (5, 33), (13, 514)])
def test_a_layer_is_exact_where_nothing_is_rounded(isa: str, rows: int, k: int) -> None:
    kernels, generator = on(isa, 1), torch.Generator().manual_seed(k)
    x, weight = (torch.randint(-90, 91, (size, k), generator=generator).float() for size in (rows, 70))
    assert torch.equal(run_linear(kernels, Type.BF16, x, weight), x @ weight.T)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("x_scale", "weight_scale"),
    [(1.0, 1.0), (1e-19, 1e-19), (1e-38, 1.0), (1.0, 1e-38), (1e-38, 1e30), (3e19, 3e18)],
    ids=["usual", "subnormal sums", "subnormal inputs", "subnormal weights", "subnormal inputs matter", "overflow"],
)
@pytest.mark.parametrize(("rows", "k"), [(1, 200), (4, 33), (5, 64), (12, 1), (13, 514), (25, 1031), (131, 96)])
@pytest.mark.parametrize("isa", DOCUMENTED)
def test_a_layer_is_the_documented_instruction(
    isa: str, rows: int, k: int, x_scale: float, weight_scale: float
) -> None:
    assert_documented(isa, random(rows, k, scale=x_scale), random(70, k, seed=1, scale=weight_scale).bfloat16())


@pytest.mark.skipif("amx" not in DOCUMENTED, reason="neither AMX nor a model of it is here")
@pytest.mark.parametrize("last", [1.0, 1.25, 1.5, 1.75, 2.0, 3.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tiles_flush_what_is_subnormal_once_rounded(last: float, sign: float) -> None:
    """Above 2^-126 less three quarters of a unit, all bits of a sum round up to it."""
    x, weight = torch.zeros(2, BLOCK), torch.zeros(3, BLOCK)
    x[:, 0], weight[:, 0] = 2.0**-63, sign * 2.0**-63
    x[:, 2], weight[:, 2] = 2.0**-75, -sign * last * 2.0**-76
    assert_documented("amx", x, weight.bfloat16())


@pytest.mark.parametrize("type_", [Type.BF16, Type.BF12])
@pytest.mark.parametrize("isa", HERE)
def test_a_row_s_bits_do_not_depend_on_its_rows(isa: str, type_: Type) -> None:
    """Among up to 4,096 rows, on any number of threads, and for a depth that ends within a block."""
    x, weight = random(4096, 1000 + 37), random(70, 1000 + 37, seed=1).bfloat16()
    packed = on(isa).pack(type_, weight)
    alone = torch.cat([run(on(isa, 1), packed, x[row : row + 1]) for row in range(300)])
    for rows in (2, 3, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 300):
        for threads in (1, 2):
            assert torch.equal(bits(run(on(isa, threads), packed, x[:rows])), bits(alone[:rows]))
    most = run(on(isa), packed, x)
    assert torch.equal(bits(most[:300]), bits(alone))
    assert torch.equal(bits(run(on(isa), packed, x[4000:])), bits(most[4000:]))
