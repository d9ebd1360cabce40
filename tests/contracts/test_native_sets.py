"""Sets of instructions whose arithmetic of integers is the same: an instruction for sums of products changes no bit.

The truth is a product in float64 of rows that are rounded to int8.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculant.kernels import BLOCK_TYPES, Type
from tests.contracts.test_native_blocks import rounded
from tests.gguf_blocks import random_blocks
from tests.native import SETS, error, held, inputs_of, needs_kernels, on, random, run

pytestmark = needs_kernels
TWINS = [  # sets, and those that lack an instruction
    ("avxvnni", "avx2"), ("avx512vnni", "avx512"), ("avx512bf16", "avx512vnni"), ("amx", "avx512vnni"), ("amx", "avx2"),
    ("neondot", "neon"), ("neoni8mm", "neon"),
]  # fmt: skip
PAIRS = [pair for pair in TWINS if {*pair} <= {*SETS}]
TYPES = [type_ for type_ in BLOCK_TYPES.values() if type_ != Type.FP8]
OUTPUTS, MOST_ROWS = 97, 300
EVERY, SOME = range(1, MOST_ROWS + 1), (1, 2, 3, 4, 5, 6, 7, 9, 33, 130)


@pytest.mark.skipif(not PAIRS, reason="no two such sets are here")
@pytest.mark.parametrize(("k", "counts"), [(9 * 32, EVERY), (131 * 32, SOME)], ids=["every number of rows", "streams"])
@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
def test_sums_of_products_have_the_same_bits(type_: Type, k: int, counts: range | tuple[int, ...]) -> None:
    k = inputs_of(type_, k)
    rows = random(OUTPUTS, k) if type_ == Type.INT8 else blocks_of(type_, k)
    x = random(counts[-1], k, seed=1)
    for isa, base in PAIRS:
        expected = run(on(base, 1), on(base, 1).pack(type_, rows), x)
        if type_ != Type.INT8:
            assert error(expected, rounded(x) @ held(type_, rows, k).double().T) < 1e-5
        for threads in (1, 2):
            weight = on(isa, threads).pack(type_, rows)
            for count in counts:
                assert torch.equal(run(on(isa, threads), weight, x[:count]), expected[:count]), (isa, threads, count)


def blocks_of(type_: Type, k: int) -> torch.Tensor:
    """Return random blocks of a type."""
    return torch.from_numpy(random_blocks(type_.name, OUTPUTS, k, np.random.default_rng(0)))
