"""Prefixes of a cache that outlive it: blocks in the prefix index are written to files, and found there again.

    tokens       a b c d | e f g h | i j k l | m n o p       four full blocks
    index        b7      | b2      |         |
    files        x       | x       | x       |
    fetched                          b9                      then the sequence takes over three blocks, as always

What a prefix needs in each group of layers, and of states, is the same in memory and on disk (cache/paged.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from speculant.cache.base import KVStorage
from speculant.cache.disk import SOURCE, STATES, BlockFiles
from speculant.cache.paged import BlockPool, KVCache, PrefixNode, Source, indexed

LEAST_ROWS = 32  # of a pass that shows what a prompt's tokens cost
Missing = tuple[int, int]  # the number of a block of a text, and the place of its group


class StoredPrefixes:
    """The files of a cache's prefixes. Everything is called in the thread that uses the cache."""

    def __init__(self, cache: KVCache, files: BlockFiles, keeps_sources: bool = True) -> None:
        """keeps_sources: False if drafters need more of a source than its keys and values."""
        self.files, self._cache, self._keeps_sources = files, cache, keeps_sources
        self._storage: KVStorage = cache.storage
        self._pools: dict[int, BlockPool] = dict(enumerate(cache.pools))
        if cache.records is not None:
            self._pools[STATES] = cache.records
        for place, pool in enumerate(cache.pools):
            pool.index.on_inserted = partial(self._keep, place)
        self._sizes = {place: self._storage.size(place, self._slots(place, 0)) for place in self._pools}
        cache.stored = self

    def fetch(self, tokens: Sequence[int], cache_salt: str, seconds: float) -> bool:
        """Bring blocks of a prefix into the prefix index; return False if there was not enough time for all of them."""
        end, failed = time.perf_counter() + seconds, set[Missing]()
        nodes = self._cache.tree.match(tokens, cache_salt)
        keys = self._keys(nodes, tokens, cache_salt)
        most, block_size = len(tokens) - 1, self._cache.block_size
        known = self._cache.known(indexed(nodes), max(0, min(len(nodes) * block_size, most)))
        if known >= min(len(keys) * block_size, most):
            return True
        held = [
            (pool, block)
            for node in nodes
            for pool in self._pools.values()
            if (block := pool.index.block(node)) is not None
        ]
        for pool, block in held:
            pool.share(block)
        try:
            while missing := self._missing(nodes, keys, most, failed):
                gained = (1 + max(index for index, _ in missing)) * block_size - known
                size = sum(self._sizes[place] for _, place in missing)
                if not self.files.speed.allows(size, max(1, gained)):
                    return True
                for index, place in missing:
                    if time.perf_counter() > end:
                        return False
                    if not self._pools[place].num_free:
                        return True
                    content = self.files.read(keys[index], place, self._cache.tree.tokens_of(tokens, index))
                    if content is None or len(content) != self._sizes[place]:
                        failed.add((index, place))
                        break
                    held.append(
                        (self._pools[place], self._insert(nodes, keys, tokens, cache_salt, index, place, content))
                    )
                    self.files.read_tokens += block_size if place == 0 else 0
            return True
        finally:
            for pool, block in reversed(held):
                pool.free(block)

    def mark_used(self, prefix: Sequence[PrefixNode]) -> None:
        """Mark the files of a prefix as used, and write its states.

        A state has megabytes, and the next one of a text replaces it: it is written when the text has ended.
        """
        if STATES in self._pools:
            for place, node in enumerate(prefix):
                if (record := self._pools[STATES].index.block(node)) is not None:
                    self._keep(STATES, node, record, place + 1)
        if prefix:
            self.files.mark_used([node.key for node in prefix if node.key], list(self._pools))

    def note_passes(self, rows: int, seconds: float) -> None:
        """Note the time of passes with many rows, which is that of computing a prompt."""
        if rows >= LEAST_ROWS:
            self.files.speed.note_computed(rows, seconds)

    def load_source(self, source: Source) -> None:
        """Add an encoded source to the cache, if there is a file of it and room for it."""
        count = len(source.tokens)
        if not self._keeps_sources or self._cache.length(source.seq_id) or not count:
            return
        key = self._source_key(source)
        content = self.files.read(key, SOURCE, source.tokens) if self.files.has(key, SOURCE) else None
        if content is None or not self._cache.has_room(count):
            return
        slots = self._cache.reserve(source.seq_id, count)
        parts = [slots.slots, *slots.others]
        sizes = [self._storage.size(group, own) for group, own in enumerate(parts)]
        if sum(sizes) != len(content):
            self._cache.release(source.seq_id)
            return
        for group, (own, size) in enumerate(zip(parts, sizes, strict=True)):
            self._storage.load(group, own, content[:size])
            content = content[size:]
        self.files.read_tokens += count

    def keep_source(self, source: Source) -> None:
        """Write an encoded source."""
        if not (self._keeps_sources and source.holders):  # others are measured
            return
        slots = self._cache.slots(source.seq_id)
        size = sum(self._storage.size(group, own) for group, own in enumerate(slots))
        if not self.files.speed.pays(size, len(source.tokens)):
            return

        def content() -> bytes:
            return b"".join(self._storage.dump(group, own) for group, own in enumerate(slots))

        self.files.keep(self._source_key(source), SOURCE, source.tokens, source.cache_salt, size, content)

    def _source_key(self, source: Source) -> bytes:
        return self.files.child(self.files.root(source.cache_salt), source.tokens)

    def _keep(self, place: int, node: PrefixNode, block: int, serves: int = 1) -> None:
        """Write a block of the index, if reading it pays. serves: the blocks of which it saves the work."""
        if not self.files.speed.pays(self._sizes[place], serves * self._cache.block_size):
            return
        key, slots = self._key_of(node), self._slots(place, block)
        content = partial(self._storage.dump, place, slots)
        self.files.keep(key, place, node.tokens, node.cache_salt, self._sizes[place], content)

    def _key_of(self, node: PrefixNode) -> bytes:
        """Return the key of a node's tokens; it is kept, and so are those of the nodes before it."""
        path = list[PrefixNode]()
        while node.parent is not None and not node.key:
            path.append(node)
            node = node.parent
        key = node.key or self.files.root(node.cache_salt)
        for each in reversed(path):
            key = each.key = self.files.child(key, each.tokens)
        return key

    def _keys(self, nodes: Sequence[PrefixNode], tokens: Sequence[int], cache_salt: str) -> list[bytes]:
        """Return the keys of a text's blocks, as far as each may be known in every group without a window."""
        tree, size = self._cache.tree, self._cache.block_size
        keys = [self._key_of(node) for node in nodes]
        whole = [place for place, pool in self._pools.items() if pool.window is None]
        key = keys[-1] if keys else self.files.root(cache_salt)
        for index in range(len(nodes), len(tokens) // size):
            key = self.files.child(key, tree.tokens_of(tokens, index))
            if not all(self.files.has(key, place) for place in whole):
                break
            keys.append(key)
        return keys

    def _missing(
        self, nodes: Sequence[PrefixNode], keys: Sequence[bytes], most: int, failed: set[Missing]
    ) -> list[Missing]:
        """Return what the longest prefix of `most` positions needs that is in files alone, in the order of reading."""
        places = {id(pool): place for place, pool in self._pools.items()}

        def is_here(pool: BlockPool, index: int) -> bool:
            return index < len(nodes) and pool.index.block(nodes[index]) is not None

        def is_known(pool: BlockPool, index: int) -> bool:
            if is_here(pool, index):
                return True
            place = places[id(pool)]
            return (index, place) not in failed and self.files.has(keys[index], place)

        length = self._cache.known(is_known, min(len(keys) * self._cache.block_size, most))
        return [
            (index, place)
            for place, pool in self._pools.items()
            for index in pool.needed(length)
            if not is_here(pool, index)
        ]

    def _insert(
        self,
        nodes: list[PrefixNode],
        keys: Sequence[bytes],
        tokens: Sequence[int],
        cache_salt: str,
        index: int,
        place: int,
        content: memoryview,
    ) -> int:
        """Fill a block with content and index it; the caller holds it. Nodes up to its own are added."""
        pool, tree = self._pools[place], self._cache.tree
        block = pool.allocate()
        self._storage.load(place, self._slots(place, block), content)
        while len(nodes) <= index:
            node = tree.child(nodes[-1] if nodes else tree.root(cache_salt), tokens, len(nodes))
            node.key = keys[len(nodes)]
            nodes.append(node)
        pool.index.insert(nodes[index], block)
        return block

    def _slots(self, place: int, block: int) -> Sequence[int]:
        """Return the slots of a block, or the number of a record."""
        size = 1 if place == STATES else self._cache.block_size
        return range(block * size, (block + 1) * size)
