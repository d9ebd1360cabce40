"""Gemma 3: as Gemma 2 with norms of queries and keys; layers with a window have rotary positions of their own."""

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
    read_rope,
    window,
)
from speculant.models.description import DecoderConfig, Layer
from speculant.models.families.gemma2 import TENSORS, score_scalar
from speculant.models.gguf import GgufFamily, Number, WindowPattern

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

GGUF = GgufFamily("gemma3", windows=WindowPattern(6), config={
    "query_pre_attn_scalar": lambda config: score_scalar(config, largest=62),
    "rope_local_base_freq": Number("rope.freq_base_swa", 10000.0),
    "final_logit_softcapping": Number("final_logit_softcapping", None, None, lambda decoder: decoder.head.softcap),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Gemma 3 config.json."""
    hf = filled(hf, **DEFAULTS)
    check_unset(hf, "use_bidirectional_attention")
    norm, bias = read_norm(hf, offset=1.0), flag(hf, "attention_bias")
    mlp, every = read_mlp(hf, key="hidden_activation"), count(hf, "sliding_window_pattern", 6)
    most = count(hf, "max_position_embeddings")

    def layer(kind: str) -> Layer:
        attention = read_attention(
            hf, rope=read_rope(hf, most, kind, theta=1e4 if kind == SLIDING else 1e6),
            window=window(hf) if kind == SLIDING else None, qk_norm=norm, bias=bias, output_bias=bias,
            scale=count(hf, "query_pre_attn_scalar") ** -0.5,
        )  # fmt: skip
        return Layer(attention, mlp, norm, norm, norm, norm)

    return read_decoder(
        hf, layers_of(read_layer_types(hf, lambda index: (index + 1) % every == 0), layer), TENSORS, norm,
        embedding={"scale": count(hf, "hidden_size") ** 0.5},
        head={"softcap": optional_number(hf, "final_logit_softcapping")}, by_kind=True,
    )  # fmt: skip
