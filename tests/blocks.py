"""A cache without tensors: each slot holds a token, so that the bookkeeping can be tested by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from speculant.cache import KVCache, Moves


class TokenStorage:
    """Slots of the first group that hold a token each, and that move like those of a `KVStorage`; lists the moves."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.moved: list[Moves] = []

    def move(self, moves: Moves) -> None:
        """See `KVStorage.move`."""
        self.moved.append(moves)
        moved = [self.tokens.get(source, -1) for source in moves.sources]
        assert len(set(moves.targets)) == len(moved), "a target twice"
        self.tokens.update(zip(moves.targets, moved, strict=True))


def token_cache(
    num_blocks: int | Sequence[int],
    block_size: int,
    keep_prefixes: bool = True,
    windows: Sequence[int | None] = (None,),
    max_len: int = sys.maxsize,
) -> KVCache:
    """Make a cache whose slots are for tokens."""
    storage: Any = TokenStorage()
    counts = [num_blocks] if isinstance(num_blocks, int) else num_blocks
    return KVCache(storage, counts, block_size, keep_prefixes, windows, max_len)


def moves_of(cache: KVCache) -> list[Moves]:
    """Return the moves since the last call."""
    storage: Any = cache.storage
    moved, storage.moved = storage.moved, []
    found: list[Moves] = moved
    return found


def table_of(cache: KVCache, seq_id: int, group: int) -> list[int]:
    """Return the part of a sequence's block table that belongs to a group of layers."""
    table = cache.table(seq_id).tolist()
    count = len(table) // cache.num_groups
    return table[group * count : (group + 1) * count]


def held_slots(cache: KVCache, seq_id: int, group: int = 0, first: int = 0) -> list[int]:
    """Return the slots of a sequence's positions from `first` on, in order, by its block table."""
    table, size = table_of(cache, seq_id, group), cache.block_size
    return [table[position // size] * size + position % size for position in range(first, cache.length(seq_id))]


def feed(cache: KVCache, seq_id: int, tokens: Sequence[int]) -> None:
    """Reserve positions for tokens and put them there."""
    slots = cache.reserve(seq_id, len(tokens)).slots
    _tokens(cache).update(zip(slots, tokens, strict=True))


def assert_holds(cache: KVCache, seq_id: int, tokens: Sequence[int]) -> None:
    """Assert that a sequence reads back as exactly these tokens."""
    assert [_tokens(cache)[slot] for slot in held_slots(cache, seq_id)] == list(tokens)


def _tokens(cache: KVCache) -> dict[int, int]:
    storage: Any = cache.storage
    tokens: dict[int, int] = storage.tokens
    return tokens
