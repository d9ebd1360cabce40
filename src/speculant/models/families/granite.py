"""Granite 3 and 4: Llama's arithmetic with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    POSITIVE,
    count_layers,
    flag,
    number,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
)
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily, Number

GGUF = GgufFamily("granite", paired=True, neutral={"rope.scaling.finetuned": (True,)}, config={
    "attention_multiplier": Number("attention.scale", of=lambda decoder: decoder.attention.score_scale),
    "embedding_multiplier": Number("embedding_scale", 1.0, 1.0, lambda decoder: decoder.embedding.scale),
    "residual_multiplier": Number("residual_scale", 1.0, 1.0, lambda decoder: decoder.layers[0].residual_scale),
    "logits_scaling": Number("logit_scale", of=lambda decoder: 1 / decoder.head.scale),
})  # fmt: skip


def read_scales(hf: Mapping[str, Any]) -> dict[str, float]:
    """Read the multipliers."""
    keys = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return {key: number(hf, key, 1.0, *POSITIVE) for key in keys}


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Granite config.json."""
    bias, norm, scales = flag(hf, "attention_bias"), read_norm(hf), read_scales(hf)
    attention = read_attention(hf, bias=bias, output_bias=bias, scale=scales["attention_multiplier"])
    mlp = read_mlp(hf, bias=flag(hf, "mlp_bias"))
    layer = Layer(attention, mlp, norm, norm, residual_scale=scales["residual_multiplier"])
    return read_decoder(
        hf, [layer] * count_layers(hf), embedding={"scale": scales["embedding_multiplier"]},
        head={"scale": 1 / scales["logits_scaling"]},
    )  # fmt: skip
