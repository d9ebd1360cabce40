"""OLMoE: experts in every layer; the norms of queries and keys are over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    check_absent,
    count,
    flag,
    read_attention,
    read_decoder,
    read_experts,
    read_norm,
)
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily
from speculant.models.tensor_map import TensorMap

GGUF = GgufFamily("olmoe")
_TENSORS = TensorMap((("model.layers.{}.mlp.router.weight", "model.layers.{}.mlp.gate.weight"),))


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an OLMoE config.json. Raises ModelError for one that clips queries, keys and values."""
    check_absent(hf, "clip_qkv")
    hf = {"rms_norm_eps": 1e-5, **hf}
    bias, norm = flag(hf, "attention_bias"), read_norm(hf)
    attention = read_attention(hf, bias=bias, output_bias=bias, qk_norm=norm, norm_all_heads=True)
    layer = Layer(attention, read_experts(hf, renormalise=flag(hf, "norm_topk_prob")), norm, norm)
    return read_decoder(hf, [layer] * count(hf, "num_hidden_layers"), _TENSORS)
