"""A row of a layer has the same bits alone, among 1 to 20 rows and among more: every type and instruction set.

Few rows, many rows and several tiles of rows have loops of their own. The depths end within a step, a group and a part.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from speculant.kernels import BLOCK_TYPES, Kernels, Op, Pass, Type, Weight, open_kernels, usable_sets
from speculant.models import linear
from tests import fp8
from tests.gguf_blocks import random_blocks

SETS = usable_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels are not built")
KERNELS = {isa: open_kernels(isa, 2) for isa in SETS}
PLAIN = (Type.F32, Type.BF16, Type.F16, Type.BF12, Type.INT8)
N, ODD, WHOLE = 50, 1067, 1024  # outputs; a depth of several parts of a panel, and one of whole blocks
COUNTS = (*range(1, 21), 63, 64, 65, 131)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(kernels: Kernels, type_: Type) -> Weight:
    """Pack random weights of a type."""
    if type_ in PLAIN:
        weight = random(N, ODD, seed=1).mul_(0.02)
        source = {Type.BF16: torch.bfloat16, Type.BF12: torch.bfloat16, Type.F16: torch.float16}
        return kernels.pack(type_, weight.to(source.get(type_, torch.float32)))
    if type_ == Type.FP8:
        return kernels.pack(type_, fp8.encode(random(N, WHOLE + 128, seed=1)))
    kind = next(name.upper() for name, type_of in BLOCK_TYPES.items() if type_of == type_)
    blocks = random_blocks(kind, N, WHOLE, np.random.default_rng(0), extreme=0.0)
    return kernels.pack(type_, torch.from_numpy(blocks))


def run(kernels: Kernels, weight: Weight, x: Tensor) -> Tensor:
    out = torch.full((len(x), weight.n), torch.nan)
    kernels.run((Op * 1)(linear(weight, x, out)), Pass(rows=len(x)))
    return out


@pytest.mark.parametrize("type_", [*Type], ids=lambda type_: type_.name)
@pytest.mark.parametrize("isa", SETS)
def test_a_row_is_the_same_in_every_loop(isa: str, type_: Type) -> None:
    kernels = KERNELS[isa]
    assert kernels is not None
    weight = pack(kernels, type_)
    x = random(max(COUNTS), weight.k, seed=2)
    alone = torch.cat([run(kernels, weight, row[None]) for row in x])
    assert bool(alone.isfinite().all())
    for count in COUNTS:
        assert torch.equal(run(kernels, weight, x[-count:].contiguous()), alone[-count:]), count
