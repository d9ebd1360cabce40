"""What native kernels compute, stage by stage, to compare instruction sets; tests/same_bits.py has whole models.

    python -m tests.stage_bits SET ...           prints digests as JSON
    python -m tests.stage_bits SET --only TEXT   those of stages whose names have a regular expression

Random numbers of torch depend on the processor, so others take their place there. The bits of a NaN do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculant.kernels import (
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
from speculant.models import ROUNDED, ROUNDINGS, Norm, PackedNorm, Rounding, gating, linear, normalising
from tests.contracts.test_native_rounding import EXTREMES, WEIGHTS
from tests.exactness.test_native_decoder import CACHES, VARIANTS, feed, make_decoder, packed, tokens_of
from tests.native import FLOATS, inputs_of, look_up, on, pack, random, run

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 17, 70)
DESCRIBED = 10  # random descriptions of models
Results = Iterator[Tensor]


def even_randn(*shape: Any, generator: torch.Generator | None = None, **_: Any) -> Tensor:
    """Return numbers that are about normal, from whole ones: the same on every processor."""
    size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    whole = sum(torch.randint(-(2**20), 2**20, tuple(size), generator=generator) for _ in range(4))
    return whole.float() / 2**20  # type: ignore[union-attr]


def tensors(of: object) -> Results:
    """Find the tensors in nested sequences."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, tuple | list):
        for each in of:
            yield from tensors(each)
    elif of is not None:
        yield torch.tensor(of)


def digest(results: Results) -> str:
    """Return a digest of results, in which all NaN are equal."""
    found = hashlib.sha256()
    for result in results:
        own = torch.where(result.isnan(), math.nan, result) if result.is_floating_point() else result
        found.update(str(tuple(own.shape)).encode() + own.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def inputs(rows: int, k: int) -> Tensor:
    """Return rows of x, the last of which have extreme numbers."""
    x = random(rows, k, seed=rows)
    for place, factor in enumerate((1e30, 1e-39, 0.0, math.inf, math.nan)):
        if rows > 7:
            x[-1 - place, :: 1 + 40 * (place == 3)] *= factor
    return x


def weights(kernels: Kernels, type_: Type, flags: Flag = Flag.ALIKE) -> Results:
    """Yield the results of layers, and the weights themselves."""
    k = inputs_of(type_, 600)
    weight, gated = pack(kernels, type_, 70, k, extreme=0.1), pack(kernels, type_, 70, k, 3, 4)
    for rows in ROWS:
        yield run(kernels, weight, inputs(rows, k), random(70), flags=flags)
        yield run(kernels, gated, inputs(rows, k), flags=flags | Flag.GATED)
    yield look_up(kernels, weight)


def borders(kernels: Kernels) -> Results:
    """Yield c + a * b near the least normal number, and halfway between two numbers of float32."""
    steps = torch.arange(-40, 41).repeat(50).float()
    x = torch.stack((2.0**-126 + steps * 2.0**-149, (1 + random(len(steps)).round() * 2.0**-23) * 2.0**-75), dim=1)
    tiny = (1 + torch.arange(-30, 31) * 2.0**-23) * 2.0 ** -torch.arange(70, 80).float()[:, None]
    halves = torch.stack((1 + steps * 2.0**-23, 1 + steps.flip(0) * 2.0**-23), dim=1)
    small = (1 + torch.arange(-30, 31) * 2.0**-23) * 2.0 ** -torch.arange(20, 30).float()[:, None]
    for rows, factors in ((x, tiny), (halves, small)):
        factors = torch.cat((factors, -factors)).view(-1)
        weight = kernels.pack(Type.F32, torch.stack((torch.ones_like(factors), factors), dim=1))
        yield run(kernels, weight, rows, flags=Flag.ALIKE)


def rounding(kernels: Kernels, type_: Type) -> Results:
    """Yield blocks."""
    for change in (*WEIGHTS.values(), *EXTREMES.values()):
        yield kernels.round(type_, change(random(7, 480)))


def norms(kernels: Kernels) -> Results:
    """Yield normed rows of many widths."""
    for norm in (Norm(1e-6), Norm(1e-5, "layer", bias=True)):
        for width in (*range(1, 70), 100, 511, 2048):
            x, scale, out = random(3, width, seed=width), random(width, seed=1), torch.empty(3, width)
            own = PackedNorm(norm, scale, random(width, seed=2) if norm.bias else None)
            kernels.run((Op * 1)(normalising(own, x, out)), Pass(rows=3))
            yield out


def activations(kernels: Kernels) -> Results:
    """Yield results of each activation and of a soft cap, from numbers of all sizes."""
    small = torch.from_numpy(10.0 ** np.linspace(-38, 38, 4000)).float()
    x = torch.cat([torch.arange(-20_000, 20_001) / 160, small, -small, torch.tensor([math.inf, -math.inf, math.nan])])
    for activation in Activation:
        if activation:
            out = x.flip(0).contiguous()
            op = gating(x, out, len(x), activation)
            op.factor, op.softcap = (1.7, 7.0) if activation == Activation.CLAMPED else (0.0, 0.0)
            kernels.run((Op * 1)(op), Pass(rows=1))
            yield out
    one, capped = kernels.pack(Type.F32, torch.ones(1, 1)), torch.empty(len(x), 1)
    kernels.run((Op * 1)(linear(one, x[:, None].contiguous(), capped, softcap=30.0)), Pass(rows=len(x)))
    yield capped


def draws(kernels: Kernels) -> Results:
    """Yield distributions and tokens that are drawn from them."""
    settings = [
        SamplingSettings(1.0), SamplingSettings(0.6, top_p=0.9), SamplingSettings(1.3, min_p=0.02),
        SamplingSettings(0.0), SamplingSettings(0.9, top_p=0.8, min_p=0.01, top_k=40),
    ]  # fmt: skip
    sampler = NativeSampler(kernels)
    for size in (1, 7, 100, 4096, 4109, 9001):
        probs = kernels.probs(random(len(settings), size, seed=size, scale=4.0), settings).clone()
        yield probs
        yield sampler.normalise(probs[0] * 3)
        yield torch.tensor(
            sampler.draw_rows(
                probs,
                [RowDraw(row, noise, 2**50 * key + 1) for row in range(5) for noise in (0, 1) for key in range(40)],
            )
        )


def models(kernels: Kernels, variant: str, quantization: Rounding | None) -> Results:
    """Yield logits of a model: rotations, attention, experts, and the cache in all types."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        decoder = make_decoder(torch.bfloat16, **VARIANTS[variant])
        coded = quantization is None and dtype == torch.bfloat16
        model = packed(decoder, kernels, quantization, coded).storing_keys_as(dtype)
        tokens = tokens_of(1, model.vocab_size)
        yield feed(model, CACHES["paged"](model.cache_shape), 1, tokens, [500, 70, 5, 2, 1, 1, 61])


def descriptions(kernels: Kernels) -> Results:
    """Yield what models of random descriptions compute."""
    from tests.contracts import test_native_descriptions as own  # here, because the import takes long in an emulator

    for seed in range(DESCRIBED):
        _, model = own.make_models(own.random_description(seed), kernels.isa, 1)
        yield from tensors(own.passes(model, 40, 30))


def states(kernels: Kernels) -> Results:
    """Yield what models with states compute, and their drafts."""
    from tests.contracts import test_native_state_models as own

    for seed in range(DESCRIBED):
        _, model = own.make_models(own.describe(seed), kernels.isa, 1)
        yield from tensors([own.passes(model, 40, 30), own.drawn(model, seed)])


ALIKE: dict[str, Callable[[Kernels], Results]] = {  # all sets compute the same bits
    **{f"weights {type_.name}": partial(weights, type_=type_) for type_ in Type},
    **{f"rounding {type_.name}": partial(rounding, type_=type_) for type_ in ROUNDED},
    "borders": borders, "norms": norms, "activations": activations, "draws": draws,
    **{
        f"integers {name}": partial(models, variant=name, quantization=ROUNDINGS["int8" if name == "odd" else "int4"])
        for name in VARIANTS
    },
}  # fmt: skip
STAGES = ALIKE | {  # sets whose products are of floats and fused
    **{f"plain {type_.name}": partial(weights, type_=type_, flags=Flag.NONE) for type_ in (*FLOATS, Type.FP8)},
    **{f"floats {name}": partial(models, variant=name, quantization=None) for name in VARIANTS},
    "descriptions": descriptions, "states": states,
}  # fmt: skip


@torch.inference_mode()
def digests(isa: str, only: str = "") -> dict[str, str]:
    """Return the digests of an instruction set, by stage, for names that have a regular expression."""
    torch.randn = even_randn
    kernels, found = on(isa, 1), dict[str, str]()
    for name in filter(re.compile(only).search, STAGES):
        found[name] = digest(STAGES[name](kernels))
        print(f"{isa}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    print(json.dumps({isa: digests(isa, arguments.only) for isa in arguments.sets}))
