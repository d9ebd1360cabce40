"""A training pass: whole sequences through a decoder's modules, without a cache.

This is the arithmetic of `Decoder.forward` for sequences of one length that begin at position 0. They
need no masks, and causal attention skips the half of the scores that no row sees. A test compares both.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from speculant.kernels import reference
from speculant.models.decoder import Attention, Decoder, Layer


def hidden_states(model: Decoder, tokens: Tensor) -> Tensor:
    """Run token sequences [B, n] through a model without sliding windows or head norms: [B * n, hidden]."""
    x: Tensor = model.model.embed_tokens(tokens)
    angles = model._rotary.angles(torch.arange(tokens.shape[1]), x.dtype)
    for layer in cast(list[Layer], model.model.layers):
        x = x + _attention(layer.self_attn, layer.input_layernorm(x), angles)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    out: Tensor = model.model.norm(x)
    return out.flatten(0, 1)


def _attention(module: Attention, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Map x [B, n, hidden] to [B, n, hidden]."""
    query, key, value = (
        proj(x).view(*x.shape[:2], -1, module._dim) for proj in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = (reference.rotate(tensor, *angles).transpose(1, 2) for tensor in (query, key))
    out = functional.scaled_dot_product_attention(  # [B, heads, n, dim]
        query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    projected: Tensor = module.o_proj(out.transpose(1, 2).flatten(2))
    return projected
