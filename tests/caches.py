"""Cache content that identifies itself: a value encodes its token, layer, head and dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache
from tests.blocks import held_slots

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=3, dtype=torch.float64, device=torch.device("cpu"))


def contents(tokens: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values [n, heads, dim] of these tokens."""
    places = torch.arange(SHAPE.num_kv_heads * SHAPE.head_dim).view(1, SHAPE.num_kv_heads, SHAPE.head_dim)
    keys = torch.tensor(tokens, dtype=SHAPE.dtype).view(-1, 1, 1) * 100 + places + 10 * layer
    return keys, -keys - 0.5


def feed(cache: KVCache, seq_id: int, tokens: Sequence[int]) -> None:
    """Reserve positions for tokens and write them to every layer."""
    slots = cache.reserve(seq_id, len(tokens))
    for layer in range(SHAPE.num_layers):
        cache.storage.write(layer, torch.tensor(slots.slots, dtype=torch.int64), *contents(tokens, layer))


def read(cache: KVCache, layer: int, seq_id: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [length, heads, dim] of a sequence."""
    return cache.storage.read(layer, torch.tensor(held_slots(cache, seq_id), dtype=torch.int64))


def walk(cache: KVCache, layer: int, seq_id: int) -> tuple[Tensor, Tensor]:
    """Read a sequence as a kernel does that walks its table."""
    keys, values = cache.storage.layer(layer)
    slots = held_slots(cache, seq_id)
    return keys[slots], values[slots]


def assert_holds(cache: KVCache, seq_id: int, tokens: Sequence[int]) -> None:
    """Assert that a sequence reads back as exactly these tokens, by either way of reading."""
    assert cache.length(seq_id) == len(tokens)
    for layer in range(SHAPE.num_layers):
        for found, walked, expected in zip(
            read(cache, layer, seq_id), walk(cache, layer, seq_id), contents(tokens, layer), strict=True
        ):
            assert torch.equal(found, expected)
            assert torch.equal(walked, expected)
