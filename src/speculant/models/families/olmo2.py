"""OLMo 2: norms after each block instead of before it; queries and keys are normalised over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import count_layers, flag, read_attention, read_decoder, read_mlp, read_norm
from speculant.models.description import DecoderConfig, Layer, map_modules
from speculant.models.gguf import GgufFamily
from speculant.models.sizes import LAYER

TENSORS = map_modules(LAYER, LAYER, {
    "attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm",
})  # fmt: skip

GGUF = GgufFamily("olmo2")


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an OLMo 2 config.json."""
    bias, norm = flag(hf, "attention_bias"), read_norm(hf, default=1e-5)
    attention = read_attention(hf, bias=bias, output_bias=bias, qk_norm=norm, norm_all_heads=True)
    layer = Layer(attention, read_mlp(hf), None, None, norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf), TENSORS, norm)
