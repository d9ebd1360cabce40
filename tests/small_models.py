"""One small decoder on every backend: the reference, and each native instruction set with each type of weights."""

from __future__ import annotations

import functools

import pytest
import torch

from speculant.kernels import usable_sets
from speculant.models import CODED, ROUNDINGS, CausalLM
from tests.exactness.test_native_decoder import make_decoder, packed
from tests.native import on

NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
MODELS = [
    "reference-float64",
    *(f"{isa}-{kind}" for isa in usable_sets() for kind in ("float32", "bfloat16", CODED, *ROUNDINGS)),
]


@functools.cache
def make_model(name: str, threads: int = 1) -> CausalLM:
    """Return one of MODELS: 2 layers, 96 tokens, hidden states of 32. Quantised weights come from bfloat16 ones."""
    backend, kind = name.split("-")
    decoder = make_decoder(DTYPES.get(kind, torch.bfloat16), qkv_bias=True, output_bias=True, mlp_bias=True)
    if backend == "reference":
        return decoder
    return packed(decoder, on(backend, threads), ROUNDINGS.get(kind), coded=kind == CODED)
