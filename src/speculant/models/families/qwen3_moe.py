"""Qwen3 with experts: Qwen3's attention; some layers may have the feed-forward block of a dense model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    count,
    count_layers,
    flag,
    layers_of,
    read_attention,
    read_decoder,
    read_experts,
    read_mlp,
    read_norm,
    whole_numbers,
    window,
)
from speculant.models.description import DecoderConfig, Experts, Layer, Mlp, map_modules
from speculant.models.gguf import Count, GgufFamily, Truth, of_experts
from speculant.models.sizes import LAYER

GGUF = GgufFamily("qwen3moe", config={
    "num_experts": Count("expert_count"),
    "num_experts_per_tok": Count("expert_used_count"),
    "moe_intermediate_size": Count("expert_feed_forward_length"),
    "norm_topk_prob": Truth("expert_weights_norm", True, of_experts("renormalise")),
})  # fmt: skip
TENSORS = map_modules(LAYER, LAYER, {"mlp.router": "mlp.gate"})


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3 config.json with experts."""
    bias, norm = flag(hf, "attention_bias"), read_norm(hf)
    size = window(hf) if flag(hf, "use_sliding_window") else None
    attention = read_attention(hf, window=size, bias=bias, output_bias=bias, qk_norm=norm)
    experts = read_experts(hf, "moe_intermediate_size", renormalise=flag(hf, "norm_topk_prob"))
    layers = layers_of(read_blocks(hf, experts), lambda mlp: Layer(attention, mlp, norm, norm))
    return read_decoder(hf, layers, TENSORS)


def read_blocks(hf: Mapping[str, Any], experts: Experts) -> list[Mlp | Experts]:
    """Read the feed-forward block of each layer: experts, or that of a dense model."""
    dense, step = whole_numbers(hf, "mlp_only_layers"), count(hf, "decoder_sparse_step", 1)
    is_dense = [index in dense or (index + 1) % step > 0 for index in range(count_layers(hf))]
    plain = read_mlp(hf) if any(is_dense) else experts
    return [plain if each else experts for each in is_dense]
