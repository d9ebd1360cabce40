"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import count, read_attention, read_decoder, read_experts, read_norm, window
from speculant.models.description import DecoderConfig, Layer
from speculant.models.tensor_map import TensorMap

_STORED = {
    "router": "gate",
    "experts.{}.gate_proj": "experts.{}.w1",
    "experts.{}.up_proj": "experts.{}.w3",
    "experts.{}.down_proj": "experts.{}.w2",
}
_TENSORS = TensorMap(
    tuple(
        (f"model.layers.{{}}.mlp.{own}.weight", f"model.layers.{{}}.block_sparse_moe.{stored}.weight")
        for own, stored in _STORED.items()
    )
)


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Mixtral config.json."""
    hf = {"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5, **hf}
    attention, norm = read_attention(hf, window=window(hf)), read_norm(hf)
    layer = Layer(attention, read_experts(hf), norm, norm)
    return read_decoder(hf, [layer] * count(hf, "num_hidden_layers"), _TENSORS)
