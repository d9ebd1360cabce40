"""Every native kernel, on every instruction set here: close to the reference, and the same bits in any batch."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional

from speculant.errors import ConfigError
from speculant.kernels import Activation, Code, Kernels, Op, Pass, Type, open_kernels, reference
from speculant.models import gating, linear
from tests import fp8
from tests.examples import examples
from tests.native import FLOATS, PAIRED_SETS, SETS, held, look_up, needs_kernels, on, random, rows_of, run

pytestmark = needs_kernels
EXACT_TYPES = (*FLOATS, Type.FP8)  # all numbers in a type are multiplied as they are
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 513, 1030]))
DEEP = 2101  # inputs: enough to lie in streams on every instruction set, some of them with padding
DEPTHS = st.one_of(SIZES, st.integers(DEEP - 70, DEEP))


@pytest.fixture(params=[(isa, threads) for isa in SETS for threads in (1, 2)], ids=lambda key: f"{key[0]}-{key[1]}")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return on(*request.param)


def run_linear(
    kernels: Kernels, type_: Type, x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    """Return x weight^T (+ bias) (+ added)."""
    packed = kernels.pack(type_, rows_of(type_, weight) if type_ in EXACT_TYPES else weight)
    return run(kernels, packed, x, bias, added)


def multiplied(isa: str, type_: Type, x: Tensor) -> Tensor:
    """Return the factor of a linear layer: x, or x in bfloat16 where the instruction takes pairs of it."""
    return x.bfloat16().float() if isa in PAIRED_SETS and type_ in (Type.BF16, Type.BF12) else x


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """Return how far off float32 sums may be, in any order."""
    return 1e-6 * math.sqrt(x.shape[1] + 1) * (x.double().abs() @ weight.double().abs().T) + 1e-30


@settings(max_examples=examples(25))
@given(rows=st.integers(0, 40), n=SIZES, k=DEPTHS, exact=st.sampled_from(EXACT_TYPES), seed=st.integers(0, 99))
@pytest.mark.parametrize("isa", SETS)
def test_linear_is_the_reference(isa: str, rows: int, n: int, k: int, exact: Type, seed: int) -> None:
    kernels = on(isa)
    x, given = random(rows, k, seed=seed), random(n, k, seed=seed + 1)
    weight = held(exact, rows_of(exact, given), k)
    bias, added = random(n, seed=seed + 2), random(rows, n, seed=seed + 3)
    seen = multiplied(isa, exact, x)
    expected = torch.nn.functional.linear(seen.double(), weight.double())
    slack = bound(seen, weight)
    assert bool(((run_linear(kernels, exact, x, given) - expected).abs() <= slack).all())
    both = run_linear(kernels, exact, x, given, bias, added) - expected - bias - added
    assert bool((both.abs() <= slack + 1e-5).all())


def gated(kernels: Kernels, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    out = up.clone()
    kernels.run((Op * 1)(gating(gate, out, gate.shape[1], Activation.SILU)), Pass(rows=len(gate)))
    return out


@settings(max_examples=examples(25))
@given(rows=st.integers(0, 40), n=SIZES, seed=st.integers(0, 99))
@pytest.mark.parametrize("isa", SETS)
def test_a_gate_is_the_reference_in_any_rows(isa: str, rows: int, n: int, seed: int) -> None:
    alone, together = on(isa, 1), on(isa)
    gate, up = random(rows, n, seed=seed, scale=30.0), random(rows, n, seed=seed + 1)
    found = gated(together, gate, up)
    assert torch.allclose(found, functional.silu(gate) * up, rtol=2e-6, atol=1e-7)
    assert torch.equal(gated(alone, gate, up), found)
    for row in range(rows):
        assert torch.equal(gated(alone, gate[row : row + 1], up[row : row + 1]), found[row : row + 1])


def test_a_gate_writes_the_rows_of_its_pass_alone(kernels: Kernels) -> None:
    gate, out = random(9, 50), random(9, 50, seed=1)
    gate[3, 7], before = math.nan, out.clone()
    kernels.run((Op * 1)(gating(gate, out, 50, Activation.SILU)), Pass(rows=5))
    assert torch.equal(out[5:], before[5:])
    assert out[:5].isnan().nonzero().tolist() == [[3, 7]]


@pytest.mark.parametrize(
    ("type_", "error"), [(Type.INT8, 0.012), (Type.Q8_0, 0.009), (Type.Q4_0, 0.09), (Type.Q4_K, 0.08)]
)
def test_quantised_weights_are_close(kernels: Kernels, type_: Type, error: float) -> None:
    x, weight = random(16, 256), random(64, 256, seed=1)
    exact = x @ weight.T
    difference = run_linear(kernels, type_, x, weight) - exact
    assert float(difference.norm() / exact.norm()) < error


@pytest.mark.parametrize("depth", [64, DEEP])
@pytest.mark.parametrize(("type_", "levels", "group"), [(Type.INT8, 127, 0), (Type.Q8_0, 127, 32), (Type.Q4_0, 7, 32)])
def test_a_quantised_layer_is_exact_on_its_levels(
    kernels: Kernels, type_: Type, levels: int, group: int, depth: int
) -> None:
    """Whole weights with their largest level present, and a 127 among each 32 inputs: nothing has to be rounded."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-levels, levels + 1, (40, depth), generator=generator).float()
    weight[:, :: group or depth] = float(levels) if levels == 127 else -8.0
    x = torch.randint(-127, 128, (11, depth), generator=generator).float()
    x[:, ::32] = 127.0
    difference = run_linear(kernels, type_, x, weight) - x.double() @ weight.double().T
    assert bool((difference.abs() <= 2e-7 * (x.abs() @ weight.abs().T)).all())


def test_streams_of_e4m3_change_no_bit(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep panels lie in one stream or in several; see sp_group_streams."""
    x, weight, found, sizes = random(9, DEEP), random(67, DEEP, seed=1), [], []
    streams = ctypes.c_int64.in_dll(kernels.library, "sp_group_streams")
    for number in (1, 8):
        monkeypatch.setattr(streams, "value", number)
        found.append(run_linear(kernels, Type.FP8, x, weight))
        sizes.append(kernels.packed_bytes(Type.FP8, 67, DEEP))
    assert torch.equal(*found)
    assert sizes[0] < sizes[1]


def test_every_e4m3_number_is_multiplied_exactly(kernels: Kernels) -> None:
    """Each number alone in a row, subnormal ones and both zeros too; the two NaN are never packed."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    k, scale = 131, 0.375
    for place in (0, 1, 2, 3, 127, 128, 130):
        matrix = torch.zeros(len(numbers), k, dtype=torch.float8_e4m3fn)
        matrix[:, place] = numbers
        packed = kernels.pack(Type.FP8, fp8.join(matrix, torch.full((len(numbers), 2), scale)))
        for rows in (1, 2, 5):
            x, out = torch.full((rows, k), 0.5), torch.empty(rows, len(numbers))
            kernels.run((Op * 1)(linear(packed, x, out)), Pass(rows=rows))
            assert torch.equal(out, (0.5 * scale * numbers.float()).expand(rows, -1)), (place, rows)


@settings(max_examples=examples(20))
@given(rows=st.integers(0, 30), n=SIZES, scale=st.sampled_from([1e-20, 1.0, 1e15]))
@pytest.mark.parametrize("isa", SETS)
def test_norm_is_the_reference(isa: str, rows: int, n: int, scale: float) -> None:
    kernels = on(isa)
    x, weight = random(rows, n, scale=scale), random(n, seed=1)
    out = torch.empty(rows, n)
    op = Op(code=Code.NORM, n=n, scale=weight.data_ptr(), source=x.data_ptr(), out=out.data_ptr(), eps=1e-6)
    kernels.run((Op * 1)(op), Pass(rows=rows))
    assert torch.allclose(out, reference.rms_norm(x, weight, 1e-6), rtol=3e-6, atol=1e-30)


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", [37, DEEP])
@pytest.mark.parametrize("type_", EXACT_TYPES)
def test_tokens_are_looked_up(kernels: Kernels, type_: Type, width: int) -> None:
    table = random(101, width)
    tokens, rows = torch.tensor([0, 100, 31, 32, 33, 64, 0]), rows_of(type_, table)
    found = look_up(kernels, kernels.pack(type_, rows), tokens)
    assert torch.equal(found, held(type_, rows, width)[tokens])


def test_a_read_stays_in_its_memory(kernels: Kernels) -> None:
    """What is read beyond it, the sanitizers see (`make sanitize`)."""
    assert kernels.read_seconds(torch.ones(9 << 18, dtype=torch.uint8)) > 0


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="avx9"):
        open_kernels("avx9")
    monkeypatch.setenv("SPECULANT_ISA", "portable")
    found = open_kernels()
    assert found is not None
    assert found.isa == "portable"
