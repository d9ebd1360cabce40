"""Ministral 3: Llama's arithmetic; queries are scaled up with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import count_layers, read_attention, read_decoder, read_mlp, read_norm, window
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily, Number

YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

GGUF = GgufFamily("mistral3", needs="attention.temperature_scale", paired=True, config={
    "rope_scaling.llama_4_scaling_beta": Number(
        "attention.temperature_scale", of=lambda decoder: decoder.ropes[0].query_beta or None
    ),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Ministral 3 config.json."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling")
    hf = {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": None, **hf, "rope_parameters": given or YARN}
    norm = read_norm(hf, default=1e-5)
    layer = Layer(read_attention(hf, window=window(hf)), read_mlp(hf), norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf), norm=norm)
