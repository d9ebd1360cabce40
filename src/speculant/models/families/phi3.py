"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's arithmetic with fused projections and an optional sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    count,
    count_layers,
    filled,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    read_rope,
    window,
)
from speculant.models.description import Attention, DecoderConfig, Layer, Mlp, Rows, TensorMap, map_modules
from speculant.models.gguf import GgufFamily, Number
from speculant.models.sizes import LAYER

GGUF = GgufFamily("phi3", config={
    "original_max_position_embeddings": Number("rope.scaling.original_context_length", None),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Phi-3 config.json."""
    hf = {"sliding_window": None, **filled(hf, rms_norm_eps=1e-5, original_max_position_embeddings=4096)}
    rope = read_rope(hf, count(hf, "max_position_embeddings"), share=1.0)
    attention, mlp, norm = read_attention(hf, rope=rope, window=window(hf)), read_mlp(hf), read_norm(hf)
    return read_decoder(hf, [Layer(attention, mlp, norm, norm)] * count_layers(hf), _tensors(attention, mlp))


def _tensors(of: Attention, mlp: Mlp) -> TensorMap:
    queries, keys = of.query_size, of.key_size
    both = queries + 2 * keys
    return map_modules(LAYER, LAYER, {
        "self_attn.q_proj": Rows("self_attn.qkv_proj", 0, queries, both),
        "self_attn.k_proj": Rows("self_attn.qkv_proj", queries, keys, both),
        "self_attn.v_proj": Rows("self_attn.qkv_proj", queries + keys, keys, both),
        "mlp.gate_proj": Rows("mlp.gate_up_proj", 0, mlp.size, 2 * mlp.size),
        "mlp.up_proj": Rows("mlp.gate_up_proj", mlp.size, mlp.size, 2 * mlp.size),
    })  # fmt: skip
