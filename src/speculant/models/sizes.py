"""The cost model: a decoder's tensors, and the sizes of its passes and of its cache, from its description alone.

A model's tensors have the names that Llama's checkpoints have, in every family: see `TensorMap` for other names.
"""

from __future__ import annotations

import math

from speculant.models.description import Attention, DecoderConfig, Experts, Layer, Mlp

TABLE, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = "model.layers.{}."  # begins the names of a layer's tensors

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Return the shape of each tensor of a model. A tied head has none of its own."""
    hidden = config.hidden_size
    found: Shapes = {TABLE: (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        found |= {LAYER.format(index) + name: shape for name, shape in _layer(layer, hidden).items()}
    found[NORM] = (hidden,)
    if not config.head.tied:
        found[HEAD] = (len(config.head.tokens) or config.vocab_size, hidden)
    return found


def parameters(config: DecoderConfig) -> int:
    """Return the number of weights."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def matrix_weights(config: DecoderConfig) -> int:
    """Return how many weights of matrices a pass reads; those of a short head count as if it were whole."""
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


def activations(config: DecoderConfig) -> dict[str, int]:
    """Return the width of each array that a pass fills for a row; see models/native/program.py."""
    of = config.attention
    return {
        "x": config.hidden_size,
        "y": config.hidden_size,
        "qkv": of.query_size + 2 * of.key_size,
        "heads": of.query_size,
        "gated": max(layer.mlp.size for layer in config.layers),
    }


def _layer(layer: Layer, hidden: int) -> Shapes:
    """Return a layer's tensors."""
    found = _attention(layer.attention, hidden) | _mlp(layer.mlp, hidden)
    if layer.before_attention:
        found["input_layernorm.weight"] = (hidden,)
    return found | {"post_attention_layernorm.weight": (hidden,)}


def _attention(of: Attention, hidden: int) -> Shapes:
    found: Shapes = {"self_attn.o_proj.weight": (hidden, of.query_size)}
    for name, size in (("q", of.query_size), ("k", of.key_size), ("v", of.key_size)):
        found[f"self_attn.{name}_proj.weight"] = (size, hidden)
        if of.bias:
            found[f"self_attn.{name}_proj.bias"] = (size,)
    if of.output_bias:
        found["self_attn.o_proj.bias"] = (hidden,)
    return found | ({f"self_attn.{name}_norm.weight": (of.head_dim,) for name in "qk"} if of.qk_norm else {})


def _mlp(of: Mlp, hidden: int) -> Shapes:
    found: Shapes = {f"mlp.{name}_proj.weight": (of.size, hidden) for name in ("gate", "up")}
    found["mlp.down_proj.weight"] = (hidden, of.size)
    if of.bias:
        found |= {
            f"mlp.{name}_proj.bias": (size,) for name, size in (("gate", of.size), ("up", of.size), ("down", hidden))
        }
    return found
