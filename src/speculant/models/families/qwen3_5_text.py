"""Qwen3.5: three of four layers have a gated delta rule in place of attention, whose result is gated too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    FULL,
    LINEAR,
    MOST_HEAD_DIM,
    count,
    filled,
    flag,
    layers_of,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
)
from speculant.models.description import DecoderConfig, Expression, Layer, Rows, State, TensorMap
from speculant.models.sizes import LAYER, SELF

_CONV = 4


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read the config.json of a Qwen3.5 text model."""
    hf = filled(hf, head_dim=256)
    norm, head_dim = read_norm(hf, offset=1.0), count(hf, "head_dim", most=MOST_HEAD_DIM)
    bias, rope = flag(hf, "attention_bias"), read_rope(hf, count(hf, "max_position_embeddings"), share=0.25)
    attention = read_attention(hf, rope=rope, qk_norm=norm, bias=bias, output_bias=bias, gated=True)
    state, mlp, made = read_delta_rule(hf), read_mlp(hf), dict[str, Layer]()
    made[FULL] = Layer(attention, mlp, norm, norm)
    made[LINEAR] = Layer(None, mlp, norm, norm, state=state)
    interval = count(hf, "full_attention_interval", 4)
    kinds = read_layer_types(hf, lambda index: (index + 1) % interval == 0, LINEAR)
    return read_decoder(hf, layers_of(kinds, made.__getitem__), TensorMap(tuple(_gates(head_dim).items())), norm)


def read_delta_rule(hf: Mapping[str, Any]) -> State:
    """Read the sizes of the gated delta rule."""
    key_heads, heads = count(hf, "linear_num_key_heads", 16), count(hf, "linear_num_value_heads", 32)
    key_dim = count(hf, "linear_key_head_dim", 128, MOST_HEAD_DIM)
    head_dim = count(hf, "linear_value_head_dim", 128, MOST_HEAD_DIM)
    return State(
        2 * key_heads * key_dim + heads * head_dim, count(hf, "linear_conv_kernel_dim", _CONV, MOST_HEAD_DIM),
        heads, key_heads, key_dim, head_dim, read_norm(hf),
    )  # fmt: skip


def _gates(head_dim: int) -> dict[str, Expression]:
    """Return where queries and gates are: one after the other in each head of a tensor."""
    return {
        f"{LAYER}{SELF}{own}.{kind}": Rows(f"{LAYER}{SELF}q_proj.{kind}", first, head_dim, 2 * head_dim)
        for own, first in (("q_proj", 0), ("gate_proj", head_dim))
        for kind in ("weight", "bias")
    }
