"""Granite 4: Granite's multipliers; most layers of the models named H have Mamba 2 in place of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import (
    FULL,
    LINEAR,
    MOST_HEAD_DIM,
    POSITIVE,
    check_unset,
    count,
    filled,
    flag,
    layers_of,
    number,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
    show,
)
from speculant.models.description import DecoderConfig, Layer, Rows, State, TensorMap, map_modules
from speculant.models.families.granite import read_scales
from speculant.models.sizes import LAYER, STATE

_OLD_TYPES = {"mamba": LINEAR, "attention": FULL}  # names of layer types in the published files
_INFINITY = {"__float__": "Infinity"}  # in JSON that transformers writes
MAMBA = map_modules(LAYER, LAYER, {f"{STATE}{name}": f"mamba.{name}" for name in ("in_proj", "conv1d", "out_proj")})
VECTORS = ("A_log", "D", "dt_bias", "norm.weight")


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Granite 4 config.json."""
    bias, norm, scales = flag(hf, "attention_bias"), read_norm(hf), read_scales(hf)
    check_unset(hf, "num_local_experts")
    rotates = hf.get("position_embedding_type") == "rope"
    rope = read_rope(hf, count(hf, "max_position_embeddings")) if rotates else None
    attention = read_attention(hf, rope=rope, bias=bias, output_bias=bias, scale=scales["attention_multiplier"])
    mlp = read_mlp(filled(hf, shared_intermediate_size=1024), size="shared_intermediate_size")
    kinds = read_layer_types({**hf, "layer_types": _types(hf)}, lambda _: False, LINEAR)

    made = {FULL: Layer(attention, mlp, norm, norm, residual_scale=scales["residual_multiplier"])}
    if LINEAR in kinds:
        made[LINEAR] = replace(made[FULL], attention=None, state=read_mamba(hf))
    return read_decoder(
        hf, layers_of(kinds, made.__getitem__), _tensors(mlp.size), norm,
        embedding={"scale": scales["embedding_multiplier"]}, head={"scale": 1 / scales["logits_scaling"]},
    )  # fmt: skip


def read_mamba(hf: Mapping[str, Any]) -> State:
    """Read the sizes of Mamba 2."""
    heads, groups = count(hf, "mamba_n_heads", 128), count(hf, "mamba_n_groups", 1)
    state, size = (
        count(hf, "mamba_d_state", 256, MOST_HEAD_DIM),
        count(hf, "hidden_size") * count(hf, "mamba_expand", 2),
    )
    given = None if hf.get("mamba_d_head") == "auto" else hf.get("mamba_d_head")
    head_dim = count({"mamba_d_head": given}, "mamba_d_head", max(1, size // heads), MOST_HEAD_DIM)
    if heads * head_dim != size:
        raise ModelError(
            f"config.json has {heads} heads of {head_dim} in states of {size} numbers",
            "check mamba_n_heads, mamba_d_head, mamba_expand and hidden_size in config.json.",
        )
    return State(
        size + 2 * groups * state, count(hf, "mamba_d_conv", 4, MOST_HEAD_DIM), heads, groups, state, head_dim,
        read_norm(hf), flag(hf, "mamba_proj_bias"), flag(hf, "mamba_conv_bias", True), _steps(hf),
    )  # fmt: skip


def _steps(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Read the limits of time steps."""
    key, given = "time_step_limit", hf.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ModelError(f"config.json has {key} = {show(given)}, not two numbers", "correct config.json.")
    least, most = (math.inf if each == _INFINITY else each for each in given)
    least = number({key: least}, key, None, 0, POSITIVE[1])
    return least, number({key: most}, key, None, max(least, POSITIVE[0]), math.inf)


def _types(hf: Mapping[str, Any]) -> Any:
    """Return the layer types by their names here."""
    given = hf.get("layer_types")
    return [_OLD_TYPES.get(kind, kind) for kind in given] if isinstance(given, list) else given


def _tensors(size: int) -> TensorMap:
    """Return the names in the files."""
    vectors = ((f"{LAYER}{STATE}{name}", f"{LAYER}mamba.{name}") for name in VECTORS)
    mlp = map_modules(LAYER, LAYER, {
        "mlp.gate_proj": Rows("shared_mlp.input_linear", 0, size, 2 * size),
        "mlp.up_proj": Rows("shared_mlp.input_linear", size, size, 2 * size),
        "mlp.down_proj": "shared_mlp.output_linear",
    })  # fmt: skip
    return TensorMap((*MAMBA.names, *vectors, *mlp.names))
