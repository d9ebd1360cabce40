"""A training pass: whole sequences through a decoder, and through an encoder if there is one, without a cache.

Without sliding windows no masks are needed, and causal attention skips the half of the scores that no row sees. A test
compares the states with those of a pass with a cache, for every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from speculant.kernels import attend
from speculant.models import Attend, Attention, Decoder, Learned, buckets_of, distance_scores, load_model


def load_plain(source: str, role: str = "target", device: str = "cpu") -> Decoder:
    """Load a model in float32."""
    return cast(Decoder, load_model(source, "float32", device, role=role).model)


def hidden_states(model: Decoder, tokens: Tensor) -> Tensor:
    """Run token sequences [B, n] through a model: [B * n, hidden]."""
    return states_of_layers(model, tokens, [model.num_layers + 1])[0].flatten(0, 1)


def states_of_layers(
    model: Decoder, tokens: Tensor, layers: Sequence[int], attend: Attend | None = None
) -> list[Tensor]:
    """Return the states [B, n, hidden] of such sequences, for layers as `TargetNeeds.hidden_layers` counts them.

    attend: None = `attend_causally`; `AttendToSources` for an encoder-decoder model.
    """
    found, embedded = dict[int, Tensor](), model.look_up(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    for index, x in enumerate(model.states(embedded, positions, attend or attend_causally, tokens=tokens)):
        if index in layers:
            found[index] = x
    found[model.num_layers + 1] = model.model.norm(x)
    return [found[layer] for layer in layers]


def attend_causally(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
    """See `Attend`: rows [B, n, heads, dim] see themselves and those before them in their sequence."""
    assert not of.source, "a source has a pass of its own: AttendToSources"
    positions, window = torch.arange(query.shape[1], device=query.device), of.window
    if of.distances is None and not (window and window < len(positions)):
        return attend_masked(of, query, key, value, None, learned)
    added = _distances(of, positions, learned)
    return attend_masked(of, query, key, value, within_window(positions, positions, window), learned, added)


def attend_masked(
    of: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    learned: Learned,
    added: Tensor | None = None,
) -> Tensor:
    """Attend with queries [B, r, heads, dim] to k keys.

    mask [r, k], or one for each sequence [B, 1, r or 1, k]: which keys a row sees, None = causal attention. added
    [heads, r, k]: numbers that are added to scores, with a mask.
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if of.softcap is None and learned.sinks is None:
        seen = mask if mask is None or added is None else added.masked_fill(~mask, -torch.inf)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=mask is None, scale=of.score_scale, enable_gqa=of.groups > 1
        )
    else:
        seen = (
            torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            if mask is None
            else mask
        )
        hidden = torch.zeros(seen.shape, device=query.device) if added is None else added
        key, value = (each.repeat_interleave(of.groups, dim=1) for each in (key, value))
        sinks = None if learned.sinks is None else learned.sinks.view(-1, 1, 1)
        hidden = hidden.masked_fill(~seen, -torch.inf)
        out = attend(query, key, value, hidden, of.score_scale, of.softcap, sinks)
    return out.transpose(1, 2)


def _distances(of: Attention, positions: Tensor, learned: Learned) -> Tensor | None:
    """Return what distances add to the scores [heads, n, n] of rows at positions [n]; None = nothing."""
    if of.distances is None:
        return None
    return distance_scores(learned, buckets_of(of.distances, positions[:, None] - positions))


def within_window(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys each row sees [r, k], by positions [r] and [k]: those up to its own, within the window."""
    distance = queries[:, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class AttendToSources:
    """See `Attend`, for texts [B, n, ...] that are decoded from sources of the same batch."""

    def __init__(self, model: Decoder, encoded: Tensor, lengths: Tensor) -> None:
        self._keys, self._seen = list(model.source_keys(encoded)), _within(encoded, lengths)

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """See `Attend`."""
        if not of.source:
            return attend_causally(layer, of, query, key, value, learned)
        return attend_masked(of, query, *self._keys[layer], self._seen, learned)


def encoded_sources(model: Decoder, sources: Tensor, lengths: Tensor) -> Tensor:
    """Encode sources [B, m], whose first `lengths` [B] tokens count: [B, m, hidden], after the encoder's norm."""
    embedded = model.look_up(sources)
    seen, positions = _within(embedded, lengths), torch.arange(sources.shape[1], device=sources.device)

    def attend_to_all(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
        return attend_masked(of, query, key, value, seen, learned, _distances(of, positions, learned))

    assert model.encoder is not None, "the model has no encoder"
    encoded: Tensor = model.encoder(embedded, positions, attend_to_all)
    return encoded


def decoded_states(model: Decoder, tokens: Tensor, encoded: Tensor, lengths: Tensor) -> Tensor:
    """Run texts [B, n], which begin with a start token, through an encoder-decoder model: [B, n, hidden].

    encoded, lengths: those of their sources, see `encoded_sources`. Texts may be padded at the end with any tokens.
    """
    return states_of_layers(model, tokens, [model.num_layers + 1], AttendToSources(model, encoded, lengths))[0]


def _within(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return which keys [B, 1, 1, m] are within the lengths [B] of sequences of rows [B, m, ...]."""
    places = torch.arange(rows.shape[1], device=rows.device)
    return (places < lengths[:, None])[:, None, None]
