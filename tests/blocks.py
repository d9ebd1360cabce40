"""A cache without tensors: each slot holds a token, so that a block manager can be tested by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speculant.cache.base import BlockManager, KVCache, Moves


class TokenStorage:
    """Slots that hold a token each, and that move like those of a `KVStorage`."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def move(self, moves: Moves) -> None:
        """See `KVStorage.move`."""
        moved = [self.tokens[source] for source in moves.sources]
        assert len(set(moves.targets)) == len(moved), "a target twice"
        self.tokens.update(zip(moves.targets, moved, strict=True))


def token_cache(manager: BlockManager) -> KVCache:
    """Pair a block manager with slots for tokens."""
    storage: Any = TokenStorage()
    return KVCache(manager, storage)


def held_slots(manager: BlockManager | KVCache, seq_id: int) -> list[int]:
    """Return the slots of a sequence's positions, in order, by its block table."""
    table, size = manager.table(seq_id), manager.block_size
    return [table[position // size] * size + position % size for position in range(manager.length(seq_id))]


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
