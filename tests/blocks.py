"""A cache without tensors: each slot holds a token, so that a block manager can be tested by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speculant.cache import BlockManager, GroupedBlockManager, KVCache, Moves


class TokenStorage:
    """Slots that hold a token each, and that move like those of a `KVStorage`."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def move(self, moves: Moves) -> None:
        """See `KVStorage.move`."""
        moved = [self.tokens[source] for source in moves.sources]
        assert len(set(moves.targets)) == len(moved), "a target twice"
        self.tokens.update(zip(moves.targets, moved, strict=True))


def managers_of(cache: KVCache | BlockManager) -> list[BlockManager]:
    """Return the block manager of each group of layers."""
    manager = cache.manager if isinstance(cache, KVCache) else cache
    return [*manager.managers] if isinstance(manager, GroupedBlockManager) else [manager]


def token_cache(manager: BlockManager) -> KVCache:
    """Pair a block manager with slots for tokens."""
    storage: Any = TokenStorage()
    return KVCache(manager, storage)


def table_of(manager: BlockManager | KVCache, seq_id: int, group: int) -> list[int]:
    """Return the part of a sequence's block table that belongs to a group of layers."""
    table = manager.table(seq_id).tolist()
    count = len(table) // manager.num_groups
    return table[group * count : (group + 1) * count]


def held_slots(manager: BlockManager | KVCache, seq_id: int, group: int = 0, first: int = 0) -> list[int]:
    """Return the slots of a sequence's positions from `first` on, in order, by its block table."""
    table, size = table_of(manager, seq_id, group), manager.block_size
    return [table[position // size] * size + position % size for position in range(first, manager.length(seq_id))]


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
