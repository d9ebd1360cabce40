"""A training pass: whole sequences through a decoder's modules, without a cache.

This is the arithmetic of `Decoder.forward` for sequences of one length that begin at position 0. Without sliding
windows they need no masks, and causal attention skips the half of the scores that no row sees. A test compares both
for every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from speculant.kernels import reference
from speculant.models.reference.decoder import Attention, Decoder, Layer
from speculant.models.weights.load import load_model


def load_plain(source: str, role: str = "target") -> Decoder:
    """Load a model in float32."""
    return cast(Decoder, load_model(source, "float32", role=role).model)


def hidden_states(model: Decoder, tokens: Tensor) -> Tensor:
    """Run token sequences [B, n] through a model: [B * n, hidden]."""
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
    if module._qk_norm:
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = (reference.rotate(tensor, *angles).transpose(1, 2) for tensor in (query, key))
    return query, key, value.transpose(1, 2)


def attend_causally(module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return what is added to the states [B, n, hidden] of rows that see themselves and those before them."""
    length, window = query.shape[2], module._window
    mask = within_window(torch.arange(length), torch.arange(length), window) if window and window < length else None
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    projected: Tensor = module.o_proj(out.transpose(1, 2).flatten(2))
    return projected


def within_window(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys rows see [r, k], by their positions [r] and [k]: those up to their own in the window."""
    distance = queries[:, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
