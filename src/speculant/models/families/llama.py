"""Llama 2, 3, 3.1 and 3.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import count_layers, flag, read_attention, read_decoder, read_mlp, read_norm
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily

GGUF = GgufFamily("llama", paired=True)


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Llama config.json."""
    bias, norm = flag(hf, "attention_bias"), read_norm(hf)
    attention = read_attention(hf, bias=bias, output_bias=bias)
    layer = Layer(attention, read_mlp(hf, bias=flag(hf, "mlp_bias")), norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf))
