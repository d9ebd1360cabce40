"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import count_layers, read_attention, read_decoder, read_experts, read_norm, window
from speculant.models.description import DecoderConfig, Layer, map_modules
from speculant.models.gguf import Count, GgufFamily
from speculant.models.sizes import LAYER

TENSORS = map_modules(LAYER, LAYER, {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
})  # fmt: skip
GGUF = GgufFamily("llama", needs="expert_count", paired=True, config={
    "num_local_experts": Count("expert_count"),
    "num_experts_per_tok": Count("expert_used_count"),
}, neutral={"expert_weights_norm": (True,)})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Mixtral config.json."""
    hf = {"num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6, **hf}
    attention, norm = read_attention(hf, window=window(hf)), read_norm(hf, default=1e-5)
    layer = Layer(attention, read_experts(hf), norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf), TENSORS, norm)
