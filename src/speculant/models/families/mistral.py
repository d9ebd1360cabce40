"""Mistral: Llama's arithmetic with an optional sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import DecoderConfig, read_decoder
from speculant.models.fields import count, window


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Mistral config.json."""
    windows = (window(hf),) * count(hf, "num_hidden_layers")
    return read_decoder({"num_key_value_heads": 8, **hf}, windows=windows)  # null = as many as query heads
