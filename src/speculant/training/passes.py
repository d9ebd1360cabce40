"""A training pass: whole sequences through a decoder's modules, without a cache.

This is the arithmetic of `Decoder.forward` for sequences of one length that begin at position 0. They
need no masks, and causal attention skips the half of the scores that no row sees. A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from speculant.errors import ConfigError
from speculant.kernels import reference
from speculant.models.decoder import Attention, Decoder, Layer
from speculant.models.weights import load_model


def load_plain(source: str, role: str = "target") -> Decoder:
    """Load a model in float32. Raises ConfigError for one that a training pass can't compute."""
    model = cast(Decoder, load_model(source, "float32", role=role).model)
    own = model.config
    if own.qk_norm or any(window is not None for window in own.windows):
        raise ConfigError(
            f"{role} models with head norms or sliding windows are not supported here yet", f"use another {role}."
        )
    return model


def hidden_states(model: Decoder, tokens: Tensor) -> Tensor:
    """Run token sequences [B, n] through a model without sliding windows or head norms: [B * n, hidden]."""
    return states_of_layers(model, tokens, [model.num_layers + 1])[0].flatten(0, 1)


def states_of_layers(model: Decoder, tokens: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Return the states [B, n, hidden] of such sequences, for layers as `DrafterNeeds.hidden_layers` counts them."""
    x: Tensor = model.model.embed_tokens(tokens)
    angles = model._rotary.angles(torch.arange(tokens.shape[1]), x.dtype)
    found = {0: x}
    for index, layer in enumerate(cast(list[Layer], model.model.layers), 1):
        x = x + _attention(layer.self_attn, layer.input_layernorm(x), angles)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if index in layers:
            found[index] = x
    found[model.num_layers + 1] = model.model.norm(x)
    return [found[layer] for layer in layers]


def _attention(module: Attention, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Map x [B, n, hidden] to [B, n, hidden]."""
    return attend_causally(module, *project(module, x, angles))


def project(module: Attention, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, heads, n, dim] of rows x [B, n, hidden], at the positions of `angles`."""
    query, key, value = (
        proj(x).view(*x.shape[:2], -1, module._dim) for proj in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = (reference.rotate(tensor, *angles).transpose(1, 2) for tensor in (query, key))
    return query, key, value.transpose(1, 2)


def attend_causally(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return what is added to the states [B, n, hidden] of rows that see themselves and those before them."""
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    projected: Tensor = module.o_proj(out.transpose(1, 2).flatten(2))
    return projected
