"""Mistral: Llama's arithmetic with an optional sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import DecoderConfig, count, read_decoder


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Mistral config.json."""
    windows = (hf.get("sliding_window", 4096),) * count(hf, "num_hidden_layers")
    return read_decoder(hf, windows=windows, num_kv_heads=count(hf, "num_key_value_heads", 8))
