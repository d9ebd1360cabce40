"""Gemma 2: norms before and after each block, soft caps, a sliding window on every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    SLIDING,
    check_unset,
    count,
    filled,
    flag,
    layers_of,
    optional_number,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    window,
)
from speculant.models.description import DecoderConfig, Layer, map_modules
from speculant.models.gguf import GgufFamily, Number, WindowPattern
from speculant.models.sizes import LAYER

TENSORS = map_modules(LAYER, LAYER, {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
})  # fmt: skip
DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # null = none


def score_scalar(config: Mapping[str, Any], largest: int) -> int:
    """Return query_pre_attn_scalar, which GGUF files lack. largest: the number of layers of the family's 27B model."""
    if config["num_hidden_layers"] != largest:
        return int(config["head_dim"])
    return int(config["hidden_size"] // config["num_attention_heads"])


GGUF = GgufFamily("gemma2", windows=WindowPattern(2, 4096), config={
    "query_pre_attn_scalar": lambda config: score_scalar(config, largest=46),
    "attn_logit_softcapping": Number("attn_logit_softcapping", 50.0, of=lambda decoder: decoder.attention.softcap),
    "final_logit_softcapping": Number("final_logit_softcapping", 30.0, of=lambda decoder: decoder.head.softcap),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Gemma 2 config.json."""
    hf = {**CAPS, **filled(hf, **DEFAULTS)}
    check_unset(hf, "use_bidirectional_attention")
    norm, bias = read_norm(hf, offset=1.0), flag(hf, "attention_bias")
    mlp = read_mlp(hf, key="hidden_activation")

    def layer(kind: str) -> Layer:
        attention = read_attention(
            hf, window=window(hf) if kind == SLIDING else None, bias=bias, output_bias=bias,
            scale=count(hf, "query_pre_attn_scalar") ** -0.5, softcap=optional_number(hf, "attn_logit_softcapping"),
        )  # fmt: skip
        return Layer(attention, mlp, norm, norm, norm, norm)

    return read_decoder(
        hf, layers_of(read_layer_types(hf, lambda index: index % 2 == 1), layer), TENSORS, norm,
        embedding={"scale": count(hf, "hidden_size") ** 0.5},
        head={"softcap": optional_number(hf, "final_logit_softcapping")},
    )  # fmt: skip
