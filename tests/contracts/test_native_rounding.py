"""Rows of floats become blocks with small errors, the same blocks on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speculant.kernels import BLOCK_SIZES, Type
from speculant.models import ROUNDED, ROUNDINGS
from tests.gguf_blocks import decode, encode
from tests.native import SETS, needs_kernels, on, random

pytestmark = needs_kernels
EVEN_STEPS = {Type.Q8_0: 127, Type.Q4_0: 8, Type.Q5_0: 16}  # the largest integer, in size
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: 0.02 * x,
    "long tails": lambda x: 0.02 * x**3,
    "one of them large": lambda x: torch.where(torch.arange(x.shape[1]) % 97 == 5, 3.0, 0.02 * x),
}
EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, 0.3),
    "negative": lambda x: -1 - x.abs(),
    "one number": lambda x: torch.where(torch.arange(x.shape[1]) == 40, x, 0.0),
    "tiny": lambda x: 1e-30 * x,
    "below all floats": lambda x: 1e-42 * x,
    "huge": lambda x: 1e30 * x,
    "largest": lambda x: 3e38 * x.sign(),
}


def decoded(type_: Type, blocks: Tensor, k: int) -> Tensor:
    return torch.from_numpy(decode(type_.name, blocks.numpy())).view(len(blocks), -1)[:, :k]


def error(type_: Type, blocks: Tensor, weights: Tensor) -> float:
    return float((decoded(type_, blocks, weights.shape[1]) - weights).square().sum())


@pytest.mark.parametrize("values", [*WEIGHTS, *EXTREMES])
@pytest.mark.parametrize("type_", ROUNDED)
def test_every_instruction_set_gives_the_same(type_: Type, values: str) -> None:
    weights = {**WEIGHTS, **EXTREMES}[values](random(7, 480))
    first, *others = (on(isa, threads).round(type_, weights) for isa in SETS for threads in (1, 3))
    assert all(torch.equal(first, other) for other in others)
    assert bool(decoded(type_, first, 480).isfinite().all())


@pytest.mark.parametrize("values", WEIGHTS)
@pytest.mark.parametrize("type_", ROUNDED)
def test_errors_are_below_those_of_grids_over_the_range(type_: Type, values: str) -> None:
    """The encoder of the tests takes scales and minima from the extremes of a group, which fit one large weight.

    With zero points, a scale has the 8 bits of a bfloat16, and the encoder's has 11.
    """
    most = 1.02 if type_ in (Type.ZERO4, Type.ZERO8) else 1.0 if values == "one of them large" else 0.97
    weights = WEIGHTS[values](random(16, 1024))
    plain = error(type_, torch.from_numpy(encode(type_.name, weights.numpy())), weights)
    assert error(type_, on(SETS[0]).round(type_, weights), weights) < most * plain


@pytest.mark.parametrize(("type_", "share"), [(Type.Q4_K, 0.0051), (Type.Q5_K, 0.00125), (Type.Q6_K, 0.0003)])
def test_errors_of_normal_weights(type_: Type, share: float) -> None:
    """With the range as the grid, these shares of the squares would be 0.0064, 0.0015 and 0.0004."""
    weights = 0.02 * random(64, 1024)
    assert error(type_, on(SETS[0]).round(type_, weights), weights) < share * float(weights.square().sum())


@pytest.mark.parametrize("type_", EVEN_STEPS)
def test_weights_on_a_grid_are_exact(type_: Type) -> None:
    most = EVEN_STEPS[type_]
    integers = torch.randint(-most + 1, most, (9, 320), generator=torch.Generator().manual_seed(1)).float()
    integers[:, ::32] = -most
    weights = integers * 2.0 ** torch.arange(-9, 1).repeat_interleave(32)
    assert torch.equal(decoded(type_, on(SETS[0]).round(type_, weights), 320), weights)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.Q5_0])
def test_no_other_scale_is_much_better(type_: Type) -> None:
    """The best of 4,000 scales for each group lower the error by less than 3%."""
    weights, most = random(16, 32), EVEN_STEPS[type_]
    own = error(type_, on(SETS[0]).round(type_, weights), weights)
    scales = weights.abs().amax(1)[:, None, None] * torch.linspace(-1.6, 1.6, 4000)[:, None] / most
    q = (weights[:, None] / scales).round().clamp(-most, most - 1)
    least = (scales * q - weights[:, None]).square().sum(2).amin(1).sum()
    assert own < 1.03 * float(least)


@pytest.mark.parametrize("k", [1, 33, 255, 257])
@pytest.mark.parametrize("type_", ROUNDED)
def test_a_row_may_end_within_a_block(type_: Type, k: int) -> None:
    kernels, weights, block = on(SETS[0]), random(5, k), BLOCK_SIZES[type_][0]
    whole = torch.zeros(5, -(-k // block) * block)
    whole[:, :k] = weights
    assert torch.equal(kernels.round(type_, weights), kernels.round(type_, whole))


@pytest.mark.parametrize("type_", ROUNDED)
def test_rows_of_narrow_floats_are_those_of_wide_ones(type_: Type) -> None:
    kernels, weights = on(SETS[0]), random(5, 512)
    for narrow in (weights.bfloat16(), weights.half()):
        assert torch.equal(kernels.round(type_, narrow), kernels.round(type_, narrow.float()))


@pytest.mark.parametrize("type_", ROUNDED)
def test_floats_are_packed_as_their_blocks(type_: Type) -> None:
    kernels, weights = on(SETS[0]), random(70, 512)
    assert torch.equal(kernels.pack(type_, weights).memory, kernels.pack(type_, kernels.round(type_, weights)).memory)


def test_types_follow_from_names_and_depths() -> None:
    int4, int8 = ROUNDINGS["int4"], ROUNDINGS["int8"]
    names = ["model.layers.0.self_attn.q_proj.weight", "layers.3.self_attn.v_proj.weight", "lm_head.weight", ""]
    names += ["model.layers.0.mlp.down_proj.weight", "model.layers.7.mlp.experts.12.down_proj.weight"]
    expected = [Type.Q4_K, Type.Q6_K, Type.Q6_K, Type.Q4_K, Type.Q5_K, Type.Q5_K]
    assert [int4.type_of(name, 512) for name in names] == expected
    undivided = [Type.Q5_0, Type.Q8_0, Type.Q8_0, Type.Q5_0, Type.Q5_1, Type.Q5_1]
    assert [int4.type_of(name, 576) for name in names] == undivided
    assert {int8.type_of(name, k) for name in names for k in (512, 576)} == {Type.Q8_0}
