"""Gemma 4: two kinds of layers with different heads, last layers that share earlier keys, and inputs by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from speculant.errors import ModelError
from speculant.models.config import (
    FULL,
    MOST_HEAD_DIM,
    SLIDING,
    check_unset,
    count,
    filled,
    flag,
    is_whole,
    layers_of,
    optional_number,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
    show,
    window,
)
from speculant.models.description import Columns, DecoderConfig, Expression, Layer, Norm, Rows, TensorMap, TokenInputs
from speculant.models.sizes import LAYER

DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "sliding_window": 512,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
EVERY = 6  # each sixth layer has full attention, unless config.json lists the layer types
NAMES: dict[str, Expression] = {
    "attention_output_norm.weight": "post_attention_layernorm.weight",
    "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
    "mlp_output_norm.weight": "post_feedforward_layernorm.weight",
    "scale": "layer_scalar",
    "token_inputs.gate_proj.weight": "per_layer_input_gate.weight",
    "token_inputs.out_proj.weight": "per_layer_projection.weight",
    "token_inputs.output_norm.weight": "post_per_layer_input_norm.weight",
}
KEYS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")


class Kind(NamedTuple):
    """The differences between layers. shares: the layer whose keys and values one reads; None = it has its own."""

    name: str
    kv_heads: int
    head_dim: int
    shares: int | None


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read the config.json of a Gemma 4 text model."""
    hf = filled(hf, **DEFAULTS)
    check_unset(hf, "enable_moe_block")
    if hf.get("use_bidirectional_attention") != "vision":  # "vision" affects only the positions of images
        check_unset(hf, "use_bidirectional_attention")
    norm, bias, most = read_norm(hf), flag(hf, "attention_bias"), count(hf, "max_position_embeddings")
    mlp, wide = read_mlp(hf, key="hidden_activation"), flag(hf, "use_double_wide_mlp")
    inputs = _token_inputs(hf, norm, mlp.activation)

    def layer(kind: Kind) -> Layer:
        slides = kind.name == SLIDING
        attention = read_attention(
            {**hf, "num_key_value_heads": kind.kv_heads, "head_dim": kind.head_dim},
            rope=read_rope(hf, most, kind.name, theta=1e4 if slides else 1e6, head_dim=kind.head_dim),
            window=window(hf) if slides else None, qk_norm=norm, value_norm=replace(norm, scaled=False),
            bias=bias, output_bias=bias, scale=1.0, shares=kind.shares,
        )  # fmt: skip
        size = mlp.size * (2 if wide and kind.shares is not None else 1)
        return Layer(attention, replace(mlp, size=size), norm, norm, norm, norm, token_inputs=inputs, scaled=True)

    kinds = _kinds(hf)
    return read_decoder(
        hf, layers_of(kinds, layer), _tensors(kinds, inputs, equal_values=flag(hf, "attention_k_eq_v")), norm,
        embedding={"scale": count(hf, "hidden_size") ** 0.5},
        head={"softcap": optional_number(hf, "final_logit_softcapping")}, by_kind=True,
    )  # fmt: skip


def _kinds(hf: Mapping[str, Any]) -> list[Kind]:
    """Read the kind of each layer."""
    names = read_layer_types(hf, lambda index: (index + 1) % EVERY == 0)
    names = [*names[:-1], FULL]  # the last one always is
    heads, shares = [_heads(hf, index, name) for index, name in enumerate(names)], _shared(hf, names)
    return [Kind(name, *own, read) for name, own, read in zip(names, heads, shares, strict=True)]


def _heads(hf: Mapping[str, Any], index: int, kind: str) -> tuple[int, int]:
    """Return how many key heads a layer has, and their dimensions; config.json sets them by layer or by kind."""
    layers, usual = hf.get("per_layer_config"), {key: hf[key] for key in ("num_key_value_heads", "head_dim")}
    if layers is None:
        own: Any = {}
        if kind == FULL:
            own["head_dim"] = hf.get("global_head_dim", 512)
            if flag(hf, "attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None:
                own["num_key_value_heads"] = hf["num_global_key_value_heads"]
    else:
        own = layers.get(str(index), {}) if isinstance(layers, dict) else None
    if not isinstance(own, dict) or own.keys() - usual.keys():
        raise ModelError(
            f"config.json has per_layer_config = {show(layers)}, of which {', '.join(usual)} are implemented",
            "use a checkpoint without other entries.",
        )
    usual |= own
    return count(usual, "num_key_value_heads"), count(usual, "head_dim", most=MOST_HEAD_DIM)


def _shared(hf: Mapping[str, Any], names: Sequence[str]) -> list[int | None]:
    """Return the layer whose keys each layer reads: the last of its kind that has keys; None = its own."""
    last = hf.get("num_kv_shared_layers", 0)
    if not is_whole(last) or not 0 <= last < len(names):
        raise ModelError(
            f"config.json has num_kv_shared_layers = {show(last)} of {len(names)} layers", "correct config.json."
        )
    first = len(names) - last
    owners = {name: index for index, name in enumerate(names[:first])}
    missing = sorted(set(names[first:]) - owners.keys())
    if missing:
        raise ModelError(
            f"config.json has no layer with {missing[0]} before those that share its keys",
            "check layer_types and num_kv_shared_layers in config.json.",
        )
    return [None if index < first else owners[name] for index, name in enumerate(names)]


def _token_inputs(hf: Mapping[str, Any], norm: Norm, activation: str) -> TokenInputs | None:
    """Read the inputs of layers by token; a size of 0 = there are none."""
    if hf["hidden_size_per_layer_input"] == 0:
        return None
    size, rows = count(hf, "hidden_size_per_layer_input"), count(hf, "vocab_size_per_layer_input")
    return TokenInputs(
        size, rows, norm, activation,
        table_factor=size**0.5, projection_factor=count(hf, "hidden_size") ** -0.5, factor=2**-0.5,
    )  # fmt: skip


def _tensors(kinds: Sequence[Kind], inputs: TokenInputs | None, *, equal_values: bool) -> TensorMap:
    """Return the names in the files. equal_values: full attention uses the keys' matrix for values too."""
    names: dict[str, Expression] = {LAYER + own: LAYER + str(stored) for own, stored in NAMES.items()}
    unused = set[str]()
    for index, kind in enumerate(kinds):
        at = LAYER.format(index)
        if kind.shares is not None:
            unused |= {f"{at}self_attn.{name}" for name in KEYS}
        elif equal_values and kind.name == FULL:
            names |= {f"{at}self_attn.v_proj.{each}": f"{at}self_attn.k_proj.{each}" for each in ("weight", "bias")}
        if inputs:
            names |= _layer_names(f"{at}token_inputs.", index * inputs.size, inputs.size, len(kinds) * inputs.size)
    return TensorMap(tuple(names.items()), frozenset(unused))


def _layer_names(at: str, first: int, size: int, width: int) -> dict[str, Expression]:
    """Return where the inputs of a layer are in the tensors that all layers share."""
    return {
        f"{at}embed_tokens.weight": Columns("model.embed_tokens_per_layer.weight", first, size, width),
        f"{at}projection.weight": Rows("model.per_layer_model_projection.weight", first, size, width),
        f"{at}norm.weight": "model.per_layer_projection_norm.weight",
    }
