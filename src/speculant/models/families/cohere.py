"""Cohere's Command R: both blocks read the same norm of the residual stream; pairs of neighbours are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    POSITIVE,
    check_unset,
    count,
    count_layers,
    filled,
    flag,
    number,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    read_rope,
)
from speculant.models.description import Attention, DecoderConfig, Layer, TensorMap, Unpaired, map_modules
from speculant.models.gguf import GgufFamily, Number
from speculant.models.sizes import LAYER

GGUF = GgufFamily("command-r", paired=True, norm_eps="layer_norm_eps", config={
    "logit_scale": Number("logit_scale", zero=1.0, of=lambda decoder: decoder.head.scale),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Cohere config.json."""
    hf = filled(hf, tie_word_embeddings=True)
    check_unset(hf, "use_qk_norm")  # its scales differ from head to head
    rope = read_rope(hf, count(hf, "max_position_embeddings"), theta=500000.0)
    bias, norm = flag(hf, "attention_bias"), read_norm(hf, "layer_norm_eps", 1e-5, kind="layer")
    attention = read_attention(hf, rope=rope, bias=bias, output_bias=bias)
    layer = Layer(attention, read_mlp(hf), norm, None, parallel=True)
    scale = number(hf, "logit_scale", 0.0625, *POSITIVE)
    return read_decoder(hf, [layer] * count_layers(hf), _tensors(attention), norm, head={"scale": scale})


def _tensors(of: Attention) -> TensorMap:
    return map_modules(LAYER, LAYER, {
        "self_attn.q_proj": Unpaired("self_attn.q_proj", of.heads),
        "self_attn.k_proj": Unpaired("self_attn.k_proj", of.kv_heads),
    })  # fmt: skip
