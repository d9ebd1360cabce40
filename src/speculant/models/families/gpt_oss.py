"""gpt-oss: experts with biases and a clamped activation, attention sinks, a sliding window on every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    POSITIVE,
    SLIDING,
    count,
    filled,
    flag,
    layers_of,
    number,
    read_attention,
    read_decoder,
    read_experts,
    read_layer_types,
    read_norm,
    read_rope,
    window,
)
from speculant.models.description import Clamped, DecoderConfig, Expression, Layer, Rows, Stacked, TensorMap, Transposed
from speculant.models.sizes import EXPERT, LAYER

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}


def tensors(experts: int) -> TensorMap:
    """Return the names in the files."""

    def stored(name: str, kind: str) -> Expression:
        stack = Stacked(f"{LAYER}{EXPERT}{name}{'_bias' if kind == 'bias' else ''}", experts)
        return Transposed(stack) if kind == "weight" else stack

    return TensorMap(tuple(
        (f"{LAYER}{EXPERT}{{}}.{own}.{kind}", made)
        for kind in ("weight", "bias")
        for own, made in {
            "gate_proj": Rows(stored("gate_up_proj", kind), 0, 1, 2),
            "up_proj": Rows(stored("gate_up_proj", kind), 1, 1, 2),
            "down_proj": stored("down_proj", kind),
        }.items()
    ))  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a gpt-oss config.json."""
    hf = filled(hf, **DEFAULTS)
    bias, norm = flag(hf, "attention_bias", True), read_norm(hf)
    clamped = Clamped(number(hf, "swiglu_alpha", 1.702, *POSITIVE), number(hf, "swiglu_limit", 7.0, *POSITIVE))
    experts = read_experts(hf, bias=True, clamped=clamped)

    def layer(kind: str) -> Layer:
        attention = read_attention(
            hf, rope=read_rope(hf, count(hf, "max_position_embeddings"), theta=150000.0), bias=bias, output_bias=bias,
            window=window(hf) if kind == SLIDING else None, sinks=True,
        )  # fmt: skip
        return Layer(attention, experts, norm, norm)

    layers = layers_of(read_layer_types(hf, lambda index: index % 2 == 1), layer)
    return read_decoder(hf, layers, tensors(experts.count))
