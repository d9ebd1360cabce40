"""Qwen3: queries and keys are normalised per head before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import flag, read_attention, read_decoder, read_mlp, read_norm, read_windows, windowed
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily

GGUF = GgufFamily("qwen3")


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3 config.json."""
    bias, norm = flag(hf, "attention_bias"), read_norm(hf)
    attention = read_attention(hf, bias=bias, output_bias=bias, qk_norm=norm)
    layer = Layer(attention, read_mlp(hf), norm, norm)
    return read_decoder(hf, windowed(layer, read_windows(hf)))
