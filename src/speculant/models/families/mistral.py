"""Mistral: Llama's arithmetic with an optional sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import count_layers, read_attention, read_decoder, read_mlp, read_norm, window
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily

GGUF = GgufFamily("mistral3", paired=True)


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Mistral config.json."""
    hf = {"num_key_value_heads": 8, **hf}  # null = as many as query heads
    attention, norm = read_attention(hf, window=window(hf)), read_norm(hf)
    layer = Layer(attention, read_mlp(hf), norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf))
