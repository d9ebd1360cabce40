"""A training pass: whole sequences of one length through a decoder, without a cache.

Without sliding windows no masks are needed, and causal attention skips the half of the scores that no row sees. A test
compares the states with those of a pass with a cache, for every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from speculant.kernels.reference import attend
from speculant.models.description import Attention
from speculant.models.reference.decoder import Decoder
from speculant.models.weights.load import load_model


def load_plain(source: str, role: str = "target", device: str = "cpu") -> Decoder:
    """Load a model in float32."""
    return cast(Decoder, load_model(source, "float32", device, role=role).model)


def hidden_states(model: Decoder, tokens: Tensor) -> Tensor:
    """Run token sequences [B, n] through a model: [B * n, hidden]."""
    return states_of_layers(model, tokens, [model.num_layers + 1])[0].flatten(0, 1)


def states_of_layers(model: Decoder, tokens: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Return the states [B, n, hidden] of such sequences, for layers as `DrafterNeeds.hidden_layers` counts them."""
    found, embedded = dict[int, Tensor](), model.look_up(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    for index, x in enumerate(model.states(embedded, positions, attend_causally, tokens=tokens)):
        if index in layers:
            found[index] = x
    found[model.num_layers + 1] = model.model.norm(x)
    return [found[layer] for layer in layers]


def attend_causally(
    layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """See `Attend`: rows [B, n, heads, dim] see themselves and those before them in their sequence."""
    positions, window = torch.arange(query.shape[1], device=query.device), of.window
    mask = within_window(positions, positions, window) if window and window < len(positions) else None
    return attend_masked(of, query, key, value, mask, sinks)


def attend_masked(
    of: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attend with queries [B, r, heads, dim] to k keys; mask [r, k]: which ones a row sees, None = causal attention."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if of.softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=of.score_scale, enable_gqa=True
        )
    else:
        seen = (
            torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            if mask is None
            else mask
        )
        hidden = torch.zeros(seen.shape, device=query.device).masked_fill(~seen, -torch.inf)
        key, value = (each.repeat_interleave(of.groups, dim=1) for each in (key, value))
        scores = None if sinks is None else sinks.view(-1, 1, 1)
        out = attend(query, key, value, hidden, of.score_scale, of.softcap, scores)
    return out.transpose(1, 2)


def within_window(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys each row sees [r, k], by positions [r] and [k]: those up to its own, within the window."""
    distance = queries[:, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
