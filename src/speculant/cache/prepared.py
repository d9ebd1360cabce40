"""The blocks of the prefix index that were computed ahead of any request, until a request begins with them.

They wait as long as no request has used them:

    index    b7 ---- b2 ---- b5 ---- b1 ---- b8      b7, b2: of a conversation
                             '--- prepared ---'      a request that begins with b7 - b5 uses b5; b1 and b8 wait

A preparation that was wrong takes memory from prompts that were right. So the blocks that wait are at most a part of
the cache: further ones take the place of the oldest of the client that has the most.
"""

from __future__ import annotations

from collections import Counter

from speculant.cache.paged import KVCache, PrefixNode

PART = 4  # one block in so many may wait for a request


class PreparedPrefixes:
    """The prepared blocks of a cache. waiting: those that no request has used. computed, used: tokens so far."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.waiting: dict[PrefixNode, str] = {}  # the client by node, the oldest first
        self.computed = self.used = 0

    def add(self, seq_id: int, known: int, client: str) -> None:
        """Note the blocks of a sequence that follow its first `known` ones, which were in the index before."""
        added = self._cache.prefix(seq_id)[known:]
        self.waiting.update(dict.fromkeys(added, client))
        self.computed += len(added) * self._cache.block_size

    def use(self, seq_id: int) -> None:
        """Note that a request begins with the blocks of its sequence."""
        for node in self._cache.prefix(seq_id):
            if self.waiting.pop(node, None) is not None:
                self.used += self._cache.block_size

    def waits(self, node: PrefixNode) -> bool:
        """Whether a node was prepared, and no request has used it."""
        return node in self.waiting

    def make_room(self, blocks: int, client: str) -> int:
        """Return how many of `blocks` more of a client may wait, after older ones that wait were dropped for them.

        Those of the client that would have the most go, unless a sequence holds them.
        """
        most = self._cache.num_blocks // PART
        self._forget_evicted()
        while len(self.waiting) + blocks > most and self._drop_oldest(blocks, client):
            self._forget_evicted()
        return max(0, min(blocks, most - len(self.waiting)))

    def check(self) -> None:
        """Assert that the blocks that wait keep to their part of the cache."""
        self._forget_evicted()
        assert len(self.waiting) <= self._cache.num_blocks // PART, "too many blocks wait for requests"

    def _drop_oldest(self, blocks: int, client: str) -> bool:
        """Drop a block and all after it; return whether there was one to drop."""
        counts = Counter(self.waiting.values())
        counts[client] += blocks
        largest = max(counts, key=lambda name: (counts[name], name == client))
        return any(self._cache.forget(node) for node, name in self.waiting.items() if name == largest)

    def _forget_evicted(self) -> None:
        self.waiting = {node: client for node, client in self.waiting.items() if self._cache.has(node)}
