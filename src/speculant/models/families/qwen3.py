"""Qwen3: queries and keys are normalised per head before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import DecoderConfig, read_decoder, read_windows
from speculant.models.fields import flag


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3 config.json."""
    bias = flag(hf, "attention_bias")
    return read_decoder(hf, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=read_windows(hf))
