"""Cache content that identifies itself: a value encodes its token, layer, head and dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache
from tests.blocks import held_slots

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=3, dtype=torch.float64, device=torch.device("cpu"))


def contents(tokens: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values [n, heads, dim] of these tokens."""
    places = torch.arange(SHAPE.num_kv_heads * SHAPE.head_dim).view(1, SHAPE.num_kv_heads, SHAPE.head_dim)
    keys = torch.tensor(tokens, dtype=SHAPE.dtype).view(-1, 1, 1) * 100 + places + 10 * layer
    return keys, -keys - 0.5


def group_of(cache: KVCache, layer: int) -> int:
    """Return the group of a layer: where there are groups, each layer is one, with the longest window first."""
    return layer if cache.num_groups > 1 else 0


def seen_from(window: int | None, length: int) -> int:
    """Return the first position that a row after `length` positions sees: the last `window` ones, itself included."""
    return 0 if window is None else max(0, length - (window - 1))


def feed(cache: KVCache, seq_id: int, tokens: Sequence[int]) -> None:
    """Reserve positions for tokens and write them to every layer."""
    reserved = cache.reserve(seq_id, len(tokens))
    slots = [reserved.slots, *reserved.others]
    for layer in range(SHAPE.num_layers):
        own = torch.tensor(slots[group_of(cache, layer)] if tokens else [], dtype=torch.int64)
        cache.storage.write(layer, own, *contents(tokens, layer))


def read(cache: KVCache, layer: int, seq_id: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys and values [length - first, heads, dim] of a sequence's positions from `first` on."""
    slots = held_slots(cache, seq_id, group_of(cache, layer), first)
    return cache.storage.read(layer, torch.tensor(slots, dtype=torch.int64))


def walk(cache: KVCache, layer: int, seq_id: int, first: int) -> tuple[Tensor, Tensor]:
    """Read a sequence as a kernel does that walks its table."""
    keys, values = cache.storage.layer(layer)
    slots = held_slots(cache, seq_id, group_of(cache, layer), first)
    return keys[slots], values[slots]


def assert_holds(
    cache: KVCache, seq_id: int, tokens: Sequence[int], windows: Sequence[int | None] | None = None
) -> None:
    """Assert that a sequence reads back as exactly these tokens, by either way of reading.

    windows: of each layer; None = the cache's. Positions that no later row sees may hold anything.
    """
    assert cache.length(seq_id) == len(tokens)
    for layer in range(SHAPE.num_layers):
        window = windows[layer] if windows else cache.pools[group_of(cache, layer)].window
        first = seen_from(window, len(tokens))
        for found, walked, expected in zip(
            read(cache, layer, seq_id, first),
            walk(cache, layer, seq_id, first),
            contents(tokens[first:], layer),
            strict=True,
        ):
            assert torch.equal(found, expected)
            assert torch.equal(walked, expected)
