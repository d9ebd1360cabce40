"""Optional parts of native operations: activations, factors, soft caps, norms, learned positions, ropes by layer."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speculant.kernels import Activation, Code, Flag, Kernels, Op, Pass, Type, address, reference
from speculant.models import Norm, PackedNorm, copying, embedding, gating, linear, normalising
from tests.native import kernels, needs_kernels, random

__all__ = ["kernels"]
pytestmark = needs_kernels
ROWS = [*range(1, 10), 40]
PLAIN = [each for each in Activation if not each or each.name.lower() in reference.ACTIVATIONS]  # without a gate's own
ACTIVATIONS = [each for each in PLAIN if each]
NORMS = {
    "rms": Norm(1e-6),
    "rms with an offset": Norm(1e-5, offset=1.0),
    "layer": Norm(1e-5, "layer"),
    "layer with a bias": Norm(1e-3, "layer", bias=True),
}


def same(some: Tensor, others: Tensor) -> bool:
    """Whether numbers are equal; a NaN is equal to one."""
    return torch.equal(some.isnan(), others.isnan()) and torch.equal(some.nan_to_num(), others.nan_to_num())


def through_identity(
    kernels: Kernels, x: Tensor, flags: Flag = Flag.NONE, bias: Tensor | None = None, out: Tensor | None = None,
    *, activation: Activation = Activation.NONE, factor: float = 1.0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return what a layer whose matrix is the identity makes of x."""
    weight, out = kernels.pack(Type.F32, torch.eye(x.shape[1])), torch.empty_like(x) if out is None else out.clone()
    op = linear(weight, x, out, bias, flags, activation=activation, factor=factor, softcap=softcap)
    kernels.run((Op * 1)(op), Pass(rows=len(x)))
    return out


def activated(activation: Activation, x: Tensor) -> Tensor:
    return x if activation == Activation.NONE else reference.ACTIVATIONS[activation.name.lower()](x)


def error(found: Tensor, expected: Tensor, size: Tensor) -> float:
    """Return the largest error, as a share of a size."""
    return float(((found.double() - expected).abs() / (size.double().abs() + 1e-30)).max())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_is_that_of_torch(kernels: Kernels, activation: Activation) -> None:
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.logspace(-20, 2, 601), -torch.logspace(-20, 2, 598)])
    x = x.view(-1, 35)
    found = through_identity(kernels, x, activation=activation)
    assert error(found, activated(activation, x.double()), x) < 3e-7
    assert torch.equal(through_identity(kernels, x[3:4], activation=activation), found[3:4])
    gate = torch.ones_like(x)
    kernels.run((Op * 1)(gating(x, gate, x.shape[1], activation)), Pass(rows=len(x)))
    assert torch.equal(gate, found)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_of_large_numbers(kernels: Kernels, activation: Activation) -> None:
    large = torch.tensor([[1e3, 1e10, 1e20, 1e30, 3e38]])
    assert torch.equal(through_identity(kernels, large, activation=activation), large)
    assert torch.equal(through_identity(kernels, -large, activation=activation).abs(), torch.zeros(1, 5))
    assert bool(through_identity(kernels, torch.tensor([[math.nan]]), activation=activation).isnan())


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_a_soft_cap_is_that_of_torch(kernels: Kernels, cap: float) -> None:
    x = torch.cat([torch.linspace(-200, 200, 2001), torch.logspace(-20, 2, 601), -torch.logspace(-20, 2, 601)])
    x = x[: len(x) // 33 * 33].view(-1, 33)
    found, expected = through_identity(kernels, x, softcap=cap), reference.soft_cap(x.double(), cap)
    assert error(found, expected, expected) < 5e-7
    large = torch.tensor([1e5, 1e20, 3e38, -1e5, -1e20, -3e38, math.inf, -math.inf])[:, None]
    assert torch.equal(through_identity(kernels, large, softcap=cap), cap * large.sign())
    assert bool(through_identity(kernels, torch.tensor([[math.nan]]), softcap=cap).isnan())


@pytest.mark.parametrize("activation", PLAIN, ids=str)
def test_a_layer_applies_its_parts_in_order(kernels: Kernels, activation: Activation) -> None:
    for n in (1, 37, 64):
        x, bias, added = random(40, n, scale=3.0), random(n, seed=1), random(40, n, seed=2)
        found = through_identity(
            kernels, x, Flag.ADD, bias, added, activation=activation, factor=0.7, softcap=2.0
        )  # fmt: skip
        y = 0.7 * (x + bias).double()
        expected = added + reference.soft_cap(activated(activation, y), 2.0)
        assert error(found, expected, 1 + y.abs()) < 1e-6
        for rows in ROWS[:-1]:
            few = through_identity(
                kernels, x[:rows], Flag.ADD, bias, added[:rows], activation=activation, factor=0.7, softcap=2.0
            )  # fmt: skip
            assert torch.equal(few, found[:rows])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_gated_layer_is_its_gate_times_up(kernels: Kernels, activation: Activation) -> None:
    x, halves, biases = random(21, 40), [random(50, 40, seed=seed) for seed in (1, 2)], random(2, 50, seed=3)
    out, (gate, up) = torch.empty(21, 50), (torch.empty(21, 50) for _ in range(2))
    both = kernels.pack(Type.F32, *halves)
    parts = [kernels.pack(Type.F32, half) for half in halves]
    ops = [
        linear(both, x, out, biases, Flag.GATED, activation=activation),
        linear(parts[0], x, gate, biases[0], activation=activation),
        linear(parts[1], x, up, biases[1]),
    ]
    kernels.run((Op * 3)(*ops), Pass(rows=21))
    assert torch.equal(out, gate * up)


def normed(of: Norm, x: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return a norm by its definition, in float64; `scale` is as the file has it."""
    x, scale = x.double(), scale.double() + of.offset
    if of.kind == "layer":
        return reference.layer_norm(x, scale, None if bias is None else bias.double(), of.eps)
    return reference.rms_norm(x, scale, of.eps)


def vectors_of(of: Norm, width: int, seed: int = 5) -> tuple[PackedNorm, Tensor, Tensor | None]:
    """Return a random norm, packed and as a file has it."""
    scale, bias = random(width, seed=seed), random(width, seed=seed + 1) if of.bias else None
    return PackedNorm(of, scale + of.offset, bias), scale, bias


@pytest.mark.parametrize("of", NORMS.values(), ids=NORMS)
def test_a_norm_is_its_definition(kernels: Kernels, of: Norm) -> None:
    for width in (1, 7, 8, 37, 96, 1030):
        x = random(40, width, scale=3.0) + 2.0
        packed, scale, bias = vectors_of(of, width)
        out, copy, added = torch.empty(40, width), torch.empty(40, width), random(40, width, seed=9)
        sums = added.clone()
        ops = [normalising(packed, x, out, copy=copy), normalising(packed, x, sums, Flag.ADD, factor=0.3)]
        kernels.run((Op * 2)(*ops), Pass(rows=40))
        expected = normed(of, x, scale, bias)
        slack = 1 + expected.abs() if width > 1 else 1e4
        assert error(out, expected, torch.as_tensor(slack)) < 1e-5
        assert torch.equal(copy, x)
        assert torch.equal(sums, added + 0.3 * out)
        for rows in ROWS[:-1]:
            few = torch.empty(rows, width)
            kernels.run((Op * 1)(normalising(packed, x, few)), Pass(rows=rows))
            assert torch.equal(few, out[:rows])


@pytest.mark.parametrize("width", [5, 32, 70])
def test_embeddings_have_a_factor_and_positions(kernels: Kernels, width: int) -> None:
    table, learned, given = random(20, width), random(30, width, seed=1), random(width, seed=2)
    tokens, positions = torch.tensor([3, 19, 0, 7]), torch.tensor([0, 29, 4, 4])
    out, inputs = torch.empty(4, width), array("Q", [0, 0, 0, given.data_ptr()])
    packed = kernels.pack(Type.F32, table)
    op = embedding(packed, out, 1.7, learned)
    on = Pass(rows=4, tokens=tokens.data_ptr(), positions=positions.data_ptr())
    kernels.run((Op * 1)(op), on)
    assert torch.equal(out, 1.7 * table[tokens] + learned[positions])
    on.inputs = address(inputs)
    kernels.run((Op * 1)(op), on)
    assert torch.equal(out[3], given + learned[4]), "a given embedding has its factor already"
    assert torch.equal(out[:3], 1.7 * table[tokens[:3]] + learned[positions[:3]])
    kernels.run((Op * 1)(embedding(packed, out, flags=Flag.TOKENS)), on)
    assert torch.equal(out, table[tokens]), "rows with inputs have tokens too"


@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_a_copy_has_a_factor(kernels: Kernels, factor: float) -> None:
    """Also in place."""
    x, out = random(40, 37), torch.zeros(40, 37)
    kernels.run((Op * 1)(copying(x, out, factor)), Pass(rows=40))
    assert torch.equal(out, factor * x)
    kernels.run((Op * 1)(copying(out, out, factor)), Pass(rows=39))
    assert torch.equal(out[:39], factor * (factor * x[:39]))
    assert torch.equal(out[39], factor * x[39])


class Rotation:
    """Random rows of queries, keys and values, and an SP_ROTATE over them; layer 1 of 2, group 1 of 2, rope 1 of 2."""

    HEADS, KV_HEADS, DIM, ROWS, SLOTS, ANGLES = 4, 2, 12, 9, 20, 50

    def __init__(self, rotated: int, of: Norm | None = None, flags: Flag = Flag.NONE, stride: int = 100) -> None:
        self.rotated, self.of, self.all_heads = rotated, of, bool(flags & Flag.ALL_HEADS)
        self.before = random(self.ROWS, stride, scale=2.0)
        self.x = self.before.clone()
        self.angles = torch.randint(0, self.ANGLES, (self.ROWS,), generator=torch.Generator().manual_seed(3))
        self.tables = [(random(self.ANGLES, max(half, 1), seed=7), random(self.ANGLES, max(half, 1), seed=8))
                       for half in (5, rotated // 2)]  # fmt: skip
        self.factors = 1 + random(self.ANGLES, seed=9).abs()
        self.slots = torch.stack([torch.zeros(self.ROWS), torch.arange(self.SLOTS - 1, 0, -2)[: self.ROWS]]).long()
        self.memory = torch.full((2, 2, self.SLOTS, self.KV_HEADS, self.DIM), torch.nan)  # [layers, 2, ...]
        widths = [count * self.DIM if self.all_heads else self.DIM for count in (self.HEADS, self.KV_HEADS)]
        self.norms = [vectors_of(of, width, seed) for width, seed in zip(widths, (20, 30), strict=True)] if of else []
        self.op = Op(
            code=Code.ROTATE, type=Type.F32, heads=self.HEADS, kv_heads=self.KV_HEADS, dim=self.DIM, layer=1, group=1,
            rope=1, rotated=rotated, source=self.x.data_ptr(), stride=stride, flags=flags,
        )  # fmt: skip
        if of:
            (query, *_), (key, *_) = self.norms
            self.op.flags, self.op.eps = flags | query.flag, of.eps
            self.op.scale, self.op.key_scale = query.scale.data_ptr(), key.scale.data_ptr()
            if query.bias is not None and key.bias is not None:
                self.op.bias, self.op.key_bias = query.bias.data_ptr(), key.bias.data_ptr()

    def run(self, kernels: Kernels, scaled: bool = False) -> None:
        """Run the operation; scaled: with factors of queries."""
        pointers = [table.data_ptr() for i in (0, 1) for table in (self.tables[0][i], self.tables[1][i])]
        pointers += [self.memory[layer, kind].data_ptr() for kind in (0, 1) for layer in (0, 1)]
        lists = array("Q", [*pointers, 0, self.factors.data_ptr()])
        first = address(lists)
        on = Pass(
            rows=self.ROWS, groups=2, angles=self.angles.data_ptr(), slots=self.slots.data_ptr(), cosines=first,
            sines=first + 16, keys=first + 32, values=first + 48, query_factors=first + 64 if scaled else None,
        )  # fmt: skip
        kernels.run((Op * 1)(self.op), on)

    def part(self, x: Tensor, first: int, count: int) -> Tensor:
        """Return `count` heads of rows x."""
        return x[:, first * self.DIM : (first + count) * self.DIM].reshape(self.ROWS, count, self.DIM)

    def turned(self, which: int) -> Tensor:
        """Return the queries (0) or keys (1) [rows, heads, dim] after norm and rotation, in float64."""
        first, count = ((0, self.HEADS), (self.HEADS, self.KV_HEADS))[which]
        x = self.part(self.before, first, count).double()
        if self.of:
            _, scale, bias = self.norms[which]
            x = x.flatten(1) if self.all_heads else x
            x = normed(self.of, x, scale, bias).view(self.ROWS, count, self.DIM)
        if self.rotated:
            cosines, sines = (table[self.angles].double().repeat(1, 2)[:, None] for table in self.tables[1])
            x = reference.rotate(x, cosines, sines)
        return x


KINDS: dict[str, Callable[[], Rotation]] = {
    "no rope": lambda: Rotation(0),
    "a part": lambda: Rotation(6),
    "all": lambda: Rotation(12, stride=96),
    "norms of heads": lambda: Rotation(4, NORMS["rms with an offset"]),
    "centred norms of heads": lambda: Rotation(4, NORMS["layer with a bias"]),
    "norms of all heads": lambda: Rotation(12, NORMS["rms"], Flag.ALL_HEADS),
    "centred norms of all heads": lambda: Rotation(0, NORMS["layer with a bias"], Flag.ALL_HEADS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_keys_are_rotated_and_stored(kernels: Kernels, kind: str) -> None:
    rotation = KINDS[kind]()
    rotation.run(kernels)
    queries, keys = rotation.turned(0), rotation.turned(1)
    values = rotation.part(rotation.before, rotation.HEADS + rotation.KV_HEADS, rotation.KV_HEADS)
    found = rotation.part(rotation.x, 0, rotation.HEADS)
    slots, memory = rotation.slots[1], rotation.memory
    assert torch.allclose(found.double(), queries, rtol=1e-5, atol=1e-5)
    assert torch.allclose(memory[1, 0, slots].double(), keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(memory[1, 1, slots], values)
    assert bool(memory[0].isnan().all()), "other layers are not written"
    assert int(memory.isfinite().sum()) == 2 * rotation.ROWS * rotation.KV_HEADS * rotation.DIM
    if rotation.rotated and not rotation.of:
        rest = slice(rotation.rotated, None)
        assert torch.equal(found[..., rest], rotation.part(rotation.before, 0, rotation.HEADS)[..., rest])


def test_queries_have_factors_by_position(kernels: Kernels) -> None:
    plain, scaled = Rotation(6), Rotation(6)
    plain.run(kernels)
    scaled.run(kernels, scaled=True)
    count = Rotation.HEADS * Rotation.DIM
    assert torch.equal(scaled.x[:, :count], plain.x[:, :count] * plain.factors[plain.angles, None])
    assert same(scaled.memory, plain.memory)


def test_queries_alone_are_rotated(kernels: Kernels) -> None:
    """A layer that reads the keys of another one stores none."""
    rotation, whole = Rotation(6), Rotation(6)
    whole.run(kernels)
    rotation.op.kv_heads = 0
    rotation.run(kernels)
    count = Rotation.HEADS * Rotation.DIM
    assert torch.equal(rotation.x[:, :count], whole.x[:, :count])
    assert torch.equal(rotation.x[:, count:], rotation.before[:, count:])
    assert bool(rotation.memory.isnan().all())
