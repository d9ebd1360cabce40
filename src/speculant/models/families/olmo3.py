"""OLMo 3: as OLMo 2; three of four layers have a sliding window and unscaled rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    SLIDING,
    count,
    flag,
    layers_of,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
    window,
)
from speculant.models.description import DecoderConfig, Layer
from speculant.models.families.olmo2 import TENSORS
from speculant.models.gguf import GgufFamily, Number, WindowPattern

GGUF = GgufFamily("olmo2", needs="attention.sliding_window", windows=WindowPattern(4), config={
    "rope_local_base_freq": Number("rope.freq_base_swa", lambda config: config["rope_theta"]),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an OLMo 3 config.json."""
    bias, norm, mlp = flag(hf, "attention_bias"), read_norm(hf, default=1e-5), read_mlp(hf)

    def layer(kind: str) -> Layer:
        attention = read_attention(
            hf, rope=read_rope(hf, count(hf, "max_position_embeddings"), kind, theta=5e5),
            window=window(hf) if kind == SLIDING else None, bias=bias, output_bias=bias, qk_norm=norm,
            norm_all_heads=True,
        )  # fmt: skip
        return Layer(attention, mlp, None, None, norm, norm)

    kinds = read_layer_types(hf, lambda index: (index + 1) % 4 == 0)
    return read_decoder(hf, layers_of(kinds, layer), TENSORS, norm, by_kind=True)
