"""Llama 2, 3, 3.1 and 3.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import DecoderConfig, read_decoder
from speculant.models.fields import flag


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Llama config.json."""
    bias = flag(hf, "attention_bias")
    return read_decoder(hf, qkv_bias=bias, output_bias=bias, mlp_bias=flag(hf, "mlp_bias"))
