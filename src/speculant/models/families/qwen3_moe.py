"""Qwen3 with experts: Qwen3's attention; layers have experts, or the feed-forward block of a dense model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.models.config import (
    count,
    flag,
    numbers,
    read_attention,
    read_decoder,
    read_experts,
    read_mlp,
    read_norm,
    window,
)
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily
from speculant.models.tensor_map import TensorMap

GGUF = GgufFamily("qwen3moe")
_TENSORS = TensorMap((("model.layers.{}.mlp.router.weight", "model.layers.{}.mlp.gate.weight"),))


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3 config.json with experts."""
    bias, norm = flag(hf, "attention_bias"), read_norm(hf)
    own = {"window": window(hf) if flag(hf, "use_sliding_window") else None, "qk_norm": norm}
    attention = read_attention(hf, bias=bias, output_bias=bias, **own)
    experts = read_experts(hf, "moe_intermediate_size", renormalise=flag(hf, "norm_topk_prob"))
    layer = Layer(attention, experts, norm, norm)
    dense, step = numbers(hf, "mlp_only_layers"), count(hf, "decoder_sparse_step", 1)
    layers = [layer] * count(hf, "num_hidden_layers")
    for index in range(len(layers)):
        if index in dense or (index + 1) % step:
            layers[index] = replace(layer, mlp=read_mlp(hf))
    return read_decoder(hf, layers, _TENSORS)
