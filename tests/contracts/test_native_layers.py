"""Layers with weights of every type, on every instruction set: the same bits for a row, alone or among any others.

Few rows, many rows and several tiles of rows have loops of their own. Depths end within a step, a group and a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speculant.kernels import INDEX_BYTES, Activation, Flag, Kernels, Op, Pass, Type, panel_rows
from speculant.models import gating
from tests.examples import examples
from tests.native import SETS, inputs_of, kernels, look_up, needs_kernels, on, pack, random, run

__all__ = ["kernels"]
pytestmark = needs_kernels
# Outputs and inputs: one block, an odd number of groups, several superblocks, and enough for streams.
SHAPES = [(1, 32), (47, 32), (50, 96), (97, 288), (200, 1056), (70, 4192)]
COUNTS = (*range(1, 21), 25, 63, 64, 65, 127, 128, 129, 131, 300)
SMALL = (50, 96)
N, K = 50, 288

every_type = pytest.mark.parametrize("type_", [*Type], ids=lambda type_: type_.name)
# Arguments of `run` for n outputs and all rows.
WAYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "bias": lambda n: {"bias": random(n, seed=2)},
    "added": lambda n: {"added": random(max(COUNTS), n, seed=3)},
    "bias and added": lambda n: {"bias": random(n, seed=2), "added": random(max(COUNTS), n, seed=3)},
    "gated": lambda n: {"flags": Flag.GATED},
    "gated with biases": lambda n: {"bias": random(2, n, seed=4), "flags": Flag.GATED},
}


@pytest.mark.covering(2)
@every_type
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_row_is_the_same_in_every_loop(kernels: Kernels, shape: tuple[int, int], type_: Type) -> None:
    """In every way in `make test-all`, and in one of them, by turns, otherwise."""
    turn = ([*Type].index(type_) + SHAPES.index(shape)) % len(WAYS)
    for way in [*WAYS, *WAYS][turn : turn + examples(len(WAYS), least=1)]:
        check_rows(kernels, type_, shape, WAYS[way](shape[0]), COUNTS)


@pytest.mark.slow
@every_type
def test_a_row_is_the_same_among_any_number(kernels: Kernels, type_: Type) -> None:
    for way in WAYS.values():
        check_rows(kernels, type_, SMALL, way(SMALL[0]), range(1, max(COUNTS) + 1))


def check_rows(
    kernels: Kernels, type_: Type, shape: tuple[int, int], given: dict[str, Any], counts: Iterable[int]
) -> None:
    """Compare rows alone with the same rows among others."""
    seeds, added = (0, 1) if "flags" in given else (0,), given.get("added")
    weight = pack(kernels, type_, shape[0], inputs_of(type_, shape[1]), *seeds)
    x = random(max(COUNTS), weight.k, seed=5)

    def some(first: int, rows: int) -> Tensor:
        part = slice(first, first + rows)
        own = {} if added is None else {"added": added[part]}
        return run(kernels, weight, x[part].contiguous(), **{**given, **own})

    alone = torch.cat([some(row, 1) for row in range(len(x))])
    assert bool(alone.isfinite().all())
    for count in counts:
        first = count * 41 % (len(x) + 1 - count)
        assert torch.equal(some(first, count), alone[first : first + count]), (first, count)


@pytest.mark.covering(1)
@every_type
@pytest.mark.parametrize("threads", [1, 3, 4])
@pytest.mark.parametrize("isa", SETS)
def test_any_number_of_threads_gives_the_same(isa: str, threads: int, type_: Type) -> None:
    k = inputs_of(type_, 1056)
    one, several, x = on(isa), on(isa, threads), random(300, k)
    packed, again = (pack(kernels, type_, 200, k, extreme=0.1) for kernels in (one, several))
    known = INDEX_BYTES * -(-200 // panel_rows(one)) if type_ == Type.BF12 else None  # panels come in any order
    assert torch.equal(packed.memory[:known], again.memory[:known])
    assert torch.equal(look_up(one, packed), look_up(several, again))
    for rows in (1, 5, 300):
        assert torch.equal(run(one, packed, x[:rows]), run(several, again, x[:rows]))


@pytest.mark.covering(1)
@every_type
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_layer_is_its_two_halves(kernels: Kernels, biased: bool, type_: Type) -> None:
    k = inputs_of(type_, K)
    x, biases = random(21, k) / 10, random(2, N, seed=3) if biased else None
    found = run(kernels, pack(kernels, type_, N, k, 1, 2), x, biases, flags=Flag.GATED)
    each = [None, None] if biases is None else list(biases)
    gate, up = (
        run(kernels, pack(kernels, type_, N, k, seed), x, bias) for seed, bias in zip((1, 2), each, strict=True)
    )
    assert torch.allclose(found, functional.silu(gate) * up, rtol=2e-6, atol=1e-7)
    kernels.run((Op * 1)(gating(gate, up, N, Activation.SILU)), Pass(rows=21))
    assert torch.equal(up, found)


@pytest.mark.covering(1)
@every_type
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-40, 0.0])
def test_a_nan_of_x_stays_in_its_row(kernels: Kernels, value: float, type_: Type) -> None:
    k = inputs_of(type_, K)
    packed, x = pack(kernels, type_, N, k), random(9, k)
    clean = run(kernels, packed, x)
    x[4, 5] = value
    dirty = run(kernels, packed, x)
    others = [row for row in range(9) if row != 4]
    assert torch.equal(dirty[others], clean[others])
    if not math.isfinite(value):
        assert not bool(dirty[4].isfinite().any()), "an overflow must not vanish"
    elif value != 3e38:
        assert bool(dirty[4].isfinite().all())
