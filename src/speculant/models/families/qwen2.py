"""Qwen2 and Qwen2.5: biases on query, key and value; an optional sliding window on the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import DecoderConfig, read_decoder, read_windows


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen2 config.json."""
    return read_decoder(hf, qkv_bias=True, windows=read_windows(hf))
