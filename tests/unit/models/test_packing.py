"""Packing takes every tensor of a decoder: what the native program left out would make it another model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speculant.errors import ModelError
from speculant.kernels.native import open_kernels
from speculant.models.decoder import Decoder
from speculant.models.native_decoder import NativeDecoder
from tests.exactness.test_native_decoder import SETS, make_decoder

pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels are not built")


def pack(decoder: Decoder) -> NativeDecoder:
    kernels = open_kernels(SETS[0], 1)
    assert kernels is not None
    return NativeDecoder(decoder, kernels)


@pytest.mark.parametrize("place", ["", "model", "model.layers.1", "model.layers.0.self_attn", "model.layers.1.mlp"])
def test_packing_refuses_an_unused_tensor(place: str) -> None:
    decoder = make_decoder()
    decoder.get_submodule(place).register_parameter("extra", nn.Parameter(torch.ones(32)))
    name = f"{place}.extra".removeprefix(".")
    with pytest.raises(ModelError, match=f"does not use 1 of the model's tensors, such as {name}\n"):
        pack(decoder)


def test_packing_refuses_a_head_that_is_not_tied() -> None:
    decoder = make_decoder(tie_embeddings=True)
    decoder.lm_head.weight = nn.Parameter(decoder.lm_head.weight.detach().clone())
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        pack(decoder)


def test_packing_frees_the_decoder_s_own_weights() -> None:
    decoder = make_decoder()
    native = pack(decoder)
    assert list(decoder.parameters()) == []
    assert native.bytes_per_pass > 0
