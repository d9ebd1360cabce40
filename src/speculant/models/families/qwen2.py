"""Qwen2 and Qwen2.5: biases on query, key and value; an optional sliding window on the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import read_attention, read_decoder, read_mlp, read_norm, read_windows, windowed
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily

GGUF = GgufFamily("qwen2")


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen2 config.json."""
    norm = read_norm(hf)
    layer = Layer(read_attention(hf, bias=True), read_mlp(hf), norm, norm)
    return read_decoder(hf, windowed(layer, read_windows(hf)))
