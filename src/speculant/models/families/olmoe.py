"""OLMoE: experts in every layer; queries and keys are normalised over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    check_unset,
    count_layers,
    flag,
    read_attention,
    read_decoder,
    read_experts,
    read_norm,
)
from speculant.models.description import DecoderConfig, Layer, map_modules
from speculant.models.gguf import Count, GgufFamily, Truth, of_experts
from speculant.models.sizes import LAYER

GGUF = GgufFamily("olmoe", config={
    "num_experts": Count("expert_count"),
    "num_experts_per_tok": Count("expert_used_count"),
    "norm_topk_prob": Truth("expert_weights_norm", False, of_experts("renormalise")),
})  # fmt: skip
TENSORS = map_modules(LAYER, LAYER, {"mlp.router": "mlp.gate"})


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an OLMoE config.json."""
    check_unset(hf, "clip_qkv")
    bias, norm = flag(hf, "attention_bias"), read_norm(hf, default=1e-5)
    attention = read_attention(hf, bias=bias, output_bias=bias, qk_norm=norm, norm_all_heads=True)
    layer = Layer(attention, read_experts(hf, renormalise=flag(hf, "norm_topk_prob")), norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf), TENSORS, norm)
