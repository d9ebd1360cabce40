"""The cost model: a decoder's tensors, and the sizes of its passes and of its cache, from its description alone.

A model's tensors have the same names in every family: those of Llama's checkpoints, and for tensors that Llama does not
have, names of our own. `TensorMap` has the names in the files.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from speculant.cache.base import CacheShape, LayerShape
from speculant.models.description import Attention, DecoderConfig, Layer, Mlp, Norm, TokenInputs

if TYPE_CHECKING:
    import torch

TABLE, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
POSITIONS = "model.embed_positions.weight"
LAYER = "model.layers.{}."  # begins the names of a layer's tensors
BEFORE_ATTENTION, BEFORE_MLP = "input_layernorm", "post_attention_layernorm"  # norms of a layer
AFTER_ATTENTION, AFTER_MLP = "attention_output_norm", "mlp_output_norm"
TOKEN_INPUTS, SCALE = "token_inputs.", "scale"  # of a layer; the names of the former begin so
TOKEN_TABLE = "embed_tokens.weight"  # of the inputs

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Return the shape of each tensor of a model. A tied head has none of its own."""
    hidden = config.hidden_size
    found: Shapes = {TABLE: (config.vocab_size, hidden)}
    if config.embedding.positions:
        found[POSITIONS] = (config.embedding.positions, hidden)
    for index, layer in enumerate(config.layers):
        found |= {LAYER.format(index) + name: shape for name, shape in _layer(layer, hidden).items()}
        if layer.token_inputs:
            table = (layer.token_inputs.rows, layer.token_inputs.size)
            found[LAYER.format(index) + TOKEN_INPUTS + TOKEN_TABLE] = table
    found |= _norm(NORM.removesuffix(".weight"), config.norm, hidden)
    if not config.head.tied:
        found[HEAD] = (len(config.head.tokens) or config.vocab_size, hidden)
    return found


def parameters(config: DecoderConfig) -> int:
    """Return the number of weights."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def matrix_weights(config: DecoderConfig) -> int:
    """Return how many weights of matrices a pass reads; those of a short head count as if it were whole.

    Of tables, it reads a row for each token.
    """
    layers = sum(
        math.prod(shape)
        for layer in config.layers
        for shape in _layer(layer, config.hidden_size).values()
        if len(shape) == 2
    )
    return layers + config.hidden_size * config.vocab_size


def values_per_position(config: DecoderConfig) -> int:
    """Return how many numbers the cache holds for one position: keys and values of each layer."""
    return sum(2 * layer.attention.key_size for layer in config.layers)


def values_kept(config: DecoderConfig, length: int) -> int:
    """Return how many numbers of a sequence of `length` positions a next row needs; a layer with a window, fewer."""
    return sum(2 * layer.attention.key_size * min(length, layer.attention.window or length) for layer in config.layers)


def activations(config: DecoderConfig) -> dict[str, int]:
    """Return the width of each array that a pass fills for a row; see models/native/program.py."""
    kinds, hidden = set(config.layers), config.hidden_size
    inputs = max((layer.token_inputs.size for layer in kinds if layer.token_inputs), default=0)
    return {
        "x": hidden,
        "y": hidden,
        "qkv": max(layer.attention.fused_size for layer in kinds),
        "heads": max(layer.attention.query_size for layer in kinds),
        "gated": max(layer.mlp.size for layer in kinds),
        **({"embedded": hidden, "inputs": inputs, "projected": inputs} if inputs else {}),
    }


def cache_shape(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> CacheShape:
    """Return the shape of one position of a decoder's cache."""
    own = tuple(LayerShape(of.kv_heads, of.head_dim, of.shares) for of in (each.attention for each in config.layers))
    first = own[0]
    differing = () if len(set(own)) == 1 else own
    return CacheShape(len(own), first.num_kv_heads, first.head_dim, dtype, device, config.windows, differing)


def layer_norms(layer: Layer) -> dict[str, Norm]:
    """Return the norms that a layer has on the residual stream's width, by the names of their modules."""
    found = {
        BEFORE_ATTENTION: layer.before_attention,
        AFTER_ATTENTION: layer.after_attention,
        BEFORE_MLP: layer.before_mlp,
        AFTER_MLP: layer.after_mlp,
    }
    return {name: norm for name, norm in found.items() if norm}


def _layer(layer: Layer, hidden: int) -> Shapes:
    """Return a layer's tensors."""
    found = _attention(layer.attention, hidden) | _mlp(layer.mlp, hidden)
    for name, norm in layer_norms(layer).items():
        found |= _norm(name, norm, hidden)
    if layer.token_inputs:
        found |= {TOKEN_INPUTS + name: shape for name, shape in _token_inputs(layer.token_inputs, hidden).items()}
    if layer.scaled:
        found[SCALE] = (1,)
    return found


def _norm(name: str, norm: Norm, width: int) -> Shapes:
    kinds = (*(["weight"] if norm.scaled else []), *(["bias"] if norm.bias else []))
    return {f"{name}.{kind}": (width,) for kind in kinds}


def _token_inputs(of: TokenInputs, hidden: int) -> Shapes:
    """Return the tensors of a layer's inputs, except for its table."""
    matrices: Shapes = {
        "projection.weight": (of.size, hidden),
        "gate_proj.weight": (of.size, hidden),
        "out_proj.weight": (hidden, of.size),
    }
    return matrices | _norm("norm", of.norm, of.size) | _norm("output_norm", of.norm, hidden)


def _attention(of: Attention, hidden: int) -> Shapes:
    found: Shapes = {"self_attn.o_proj.weight": (hidden, of.query_size)}
    own = [("q", of.query_size), ("k", of.key_size), ("v", of.key_size)][: 3 if of.own_kv_heads else 1]
    for name, size in own:
        found[f"self_attn.{name}_proj.weight"] = (size, hidden)
        if of.bias:
            found[f"self_attn.{name}_proj.bias"] = (size,)
    if of.output_bias:
        found["self_attn.o_proj.bias"] = (hidden,)
    if of.sinks:
        found["self_attn.sinks"] = (of.heads,)
    if of.qk_norm:
        for name, size in zip("qk"[: 2 if of.own_kv_heads else 1], of.normed_sizes, strict=False):
            found |= _norm(f"self_attn.{name}_norm", of.qk_norm, size)
    if of.value_norm and of.own_kv_heads:
        found |= _norm("self_attn.v_norm", of.value_norm, of.head_dim)
    return found


def _mlp(of: Mlp, hidden: int) -> Shapes:
    inner = ("gate", "up") if of.gated else ("up",)
    found: Shapes = {f"mlp.{name}_proj.weight": (of.size, hidden) for name in inner}
    found["mlp.down_proj.weight"] = (hidden, of.size)
    if of.bias:
        found |= {f"mlp.{name}_proj.bias": (of.size,) for name in inner}
        found["mlp.down_proj.bias"] = (hidden,)
    return found
