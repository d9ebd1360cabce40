"""All instruction sets compute the same bits: each stage of a pass over weights of integers, and of drawing tokens.

tests/exactness/test_same_bits.py compares whole models, also with sets that this processor lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from speculant.kernels import (
    BLOCK_SIZES,
    Activation,
    Flag,
    Kernels,
    NativeSampler,
    Op,
    Pass,
    RowDraw,
    SamplingSettings,
    Type,
)
from speculant.models import ROUNDINGS, Norm, PackedNorm, gating, linear, normalising
from tests.exactness.test_native_decoder import CACHES, VARIANTS, feed, make_native, tokens_of
from tests.native import FLOATS, SETS, inputs_of, look_up, needs_kernels, on, pack, random, run, same

pytestmark = needs_kernels
ROWS = (1, 2, 5, 9, 33)


def agree(compute: Callable[[Kernels], Iterator[Tensor]]) -> None:
    """Assert that all sets compute the same bits."""
    expected = [*compute(on(SETS[-1]))]
    assert expected
    for isa in SETS[:-1]:
        for place, (found, own) in enumerate(zip(compute(on(isa)), expected, strict=True)):
            equal = same(found, own) if found.dtype == torch.float32 else torch.equal(found, own)
            assert equal, f"{isa} differs from {SETS[-1]} in result {place}"


WIDTHS = [*range(1, 70), 100, 511, 2048]


@pytest.mark.parametrize("norm", [Norm(1e-6), Norm(1e-5, "layer", bias=True)], ids=["rms", "layer"])
def test_norms(norm: Norm) -> None:
    def results(kernels: Kernels) -> Iterator[Tensor]:
        for width in WIDTHS:
            x, scale, out = random(3, width, seed=width), random(width, seed=1), torch.empty(3, width)
            packed = PackedNorm(norm, scale, random(width, seed=2) if norm.bias else None)
            kernels.run((Op * 1)(normalising(packed, x, out)), Pass(rows=3))
            yield out

    agree(results)


@pytest.mark.parametrize("activation", [each for each in Activation if each], ids=str)
def test_activations(activation: Activation) -> None:
    x = torch.cat([torch.linspace(-120, 120, 40_001), torch.logspace(-30, 30, 4_000), -torch.logspace(-30, 30, 3_999)])

    def results(kernels: Kernels) -> Iterator[Tensor]:
        out = x.flip(0).contiguous()
        op = gating(x, out, len(x), activation)
        op.factor, op.softcap = (1.7, 7.0) if activation == Activation.CLAMPED else (0.0, 0.0)
        kernels.run((Op * 1)(op), Pass(rows=1))
        yield out

    agree(results)


@pytest.mark.parametrize("type_", [*BLOCK_SIZES, Type.INT8], ids=str)
def test_weights_of_integers(type_: Type) -> None:
    k = inputs_of(type_, 300)

    def results(kernels: Kernels) -> Iterator[Tensor]:
        weight, gated = pack(kernels, type_, 70, k, extreme=0.1), pack(kernels, type_, 70, k, 3, 4)
        for rows in ROWS:
            yield run(kernels, weight, random(rows, k, seed=rows), random(70))
            yield run(kernels, gated, random(rows, k, seed=rows), flags=Flag.GATED)
        yield look_up(kernels, weight)

    agree(results)


@pytest.mark.parametrize("type_", [*FLOATS, Type.FP8], ids=str)
def test_weights_of_floats_where_asked(type_: Type) -> None:
    k = inputs_of(type_, 300)

    def results(kernels: Kernels) -> Iterator[Tensor]:
        weight = pack(kernels, type_, 70, k)
        for rows in ROWS:
            yield run(kernels, weight, random(rows, k, seed=rows), flags=Flag.ALIKE)

    agree(results)


def test_soft_caps() -> None:
    def results(kernels: Kernels) -> Iterator[Tensor]:
        x, out = torch.linspace(-300, 300, 33_000).view(-1, 33), torch.empty(1000, 33)
        weight = kernels.pack(Type.F32, torch.eye(33))
        kernels.run((Op * 1)(linear(weight, x, out, flags=Flag.ALIKE, softcap=30.0)), Pass(rows=1000))
        yield out

    agree(results)


@pytest.mark.parametrize("cache_type", [Type.F32, Type.BF16, Type.INT8], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_integers(variant: str, cache_type: Type) -> None:
    """Attention, rotation, experts and the cache: in a prompt, in chunks, and row by row."""
    dtype = {Type.F32: torch.float32, Type.BF16: torch.bfloat16, Type.INT8: torch.int8}[cache_type]
    rounding = ROUNDINGS["int8" if variant == "odd" else "int4"]

    def results(kernels: Kernels) -> Iterator[Tensor]:
        model = make_native(kernels.isa, rounding, dtype=torch.bfloat16, **VARIANTS[variant]).storing_keys_as(dtype)
        tokens = tokens_of(1, model.vocab_size)
        yield feed(model, CACHES["paged"](model.cache_shape), 1, tokens, [500, 70, 5, 2, 1, 1, 61])

    agree(results)


SIZES = (1, 7, 100, 4096, 4109, 9001)
SETTINGS = [
    SamplingSettings(1.0), SamplingSettings(0.6, top_p=0.9), SamplingSettings(1.3, min_p=0.02), SamplingSettings(0.0),
    SamplingSettings(0.9, top_p=0.8, min_p=0.01, top_k=40), SamplingSettings(2.0, top_p=0.999),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_distributions_and_draws(size: int) -> None:
    scores = random(len(SETTINGS), size, seed=size, scale=4.0)

    def results(kernels: Kernels) -> Iterator[Tensor]:
        probs, sampler = kernels.probs(scores.clone(), SETTINGS).clone(), NativeSampler(kernels)
        yield probs.view(torch.int64)
        yield sampler.normalise(probs[0] * 3).view(torch.int64)
        rows, keys = range(len(SETTINGS)), range(50)
        draws = [RowDraw(row, noise, 2**50 * key + 1) for row in rows for noise in (False, True) for key in keys]
        yield torch.tensor(sampler.draw_rows(probs, draws))

    agree(results)
