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
from dataclasses import dataclass, field
from functools import partial

from speculant.cache.base import KVStorage
from speculant.cache.disk import SOURCE, STATES, BlockFiles
from speculant.cache.paged import BlockPool, KVCache, PrefixNode, Source, indexed

LEAST_ROWS = 32  # of a pass whose time shows what a token of a prompt takes
MOST_SEARCHES = 8  # that are remembered until they go on
Missing = tuple[int, int]  # the number of a block of a text, and the place of its group


@dataclass
class Search:
    """What is known of a text's files. keys: of its first blocks. failed: files that are there and can't be used.

    reads: how many files were read; where others evict what was read, it ends at twice as many as are needed.
    """

    tokens: tuple[int, ...]
    cache_salt: str
    keys: list[bytes] = field(default_factory=list)
    is_complete: bool = False
    failed: set[Missing] = field(default_factory=set)
    reads: int = 0

    def lacks(self, index: int, place: int, ends: bool) -> None:
        """Note that a file can't be used. ends: no prefix is known beyond it."""
        self.failed.add((index, place))
        if ends:
            del self.keys[index:]
            self.is_complete = True


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
        self._searches = dict[tuple[str, tuple[int, ...]], Search]()
        cache.stored = self

    def fetch(self, tokens: Sequence[int], cache_salt: str, seconds: float) -> bool:
        """Bring blocks of a prefix into the prefix index; return False if there was not enough time for all of them.

        Then another call goes on. Each call gets further, if only by a block.
        """
        nodes, name = self._cache.tree.match(tokens, cache_salt), (cache_salt, tuple(tokens))
        search = self._searches.pop(name, None) or Search(name[1], cache_salt)
        if self._find_keys(search, nodes, seconds) and self._load(search, nodes, seconds):
            return True
        self._searches[name] = search
        if len(self._searches) > MOST_SEARCHES:  # the oldest one's request was aborted, or waits long
            del self._searches[next(iter(self._searches))]
        return False

    def _find_keys(self, search: Search, nodes: Sequence[PrefixNode], seconds: float) -> bool:
        """Find the keys of a text's blocks, as far as each may be known in every group without a window.

        Returns False if there was not enough time.
        """
        tokens, keys, end = search.tokens, search.keys, time.perf_counter() + seconds
        keys += [self._key_of(node) for node in nodes[len(keys) :]]
        whole = [place for place, pool in self._pools.items() if pool.window is None]
        while not search.is_complete:
            known = keys[-1] if keys else self.files.root(search.cache_salt)
            key = self.files.child(known, self._cache.tree.tokens_of(tokens, len(keys)))
            is_full = (len(keys) + 1) * self._cache.block_size <= len(tokens)
            search.is_complete = not is_full or not all(self.files.has(key, place) for place in whole)
            if not search.is_complete:
                keys.append(key)
                if time.perf_counter() > end:
                    return False
        return True

    def _load(self, search: Search, nodes: list[PrefixNode], seconds: float) -> bool:
        """Read what the longest known prefix lacks in memory; return False if there was not enough time."""
        block_size, most = self._cache.block_size, len(search.tokens) - 1
        known = self._cache.known(indexed(nodes), max(0, min(len(nodes) * block_size, most)))
        if known >= min(len(search.keys) * block_size, most):
            return True
        held = [
            (pool, block)
            for node in nodes
            for pool in self._pools.values()
            if (block := pool.index.block(node)) is not None
        ]
        for pool, block in held:
            pool.share(block)
        end, is_first = time.perf_counter() + seconds, True
        try:
            while missing := self._missing(search, nodes):
                gained = (1 + max(index for index, _ in missing)) * block_size - known
                size = sum(self._sizes[place] for _, place in missing)
                if not self.files.speed.allows(size, max(1, gained)):
                    return True
                for index, place in missing:
                    if not is_first and time.perf_counter() > end:
                        return False
                    pool, is_first = self._pools[place], False
                    if not pool.num_free or search.reads > 2 * len(self._pools) * len(search.keys):
                        return True
                    search.reads += 1
                    own = self._cache.tree.tokens_of(search.tokens, index)
                    content = self.files.read(search.keys[index], place, own, self._sizes[place])
                    if content is None:
                        search.lacks(index, place, ends=pool.window is None)
                        break
                    held.append((pool, self._insert(search, nodes, index, place, content)))
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
        key, sizes = (
            self._source_key(source),
            [self._storage.size(g, range(count)) for g in range(self._cache.num_groups)],
        )
        if not self._cache.has_room(count) or not self.files.has(key, SOURCE):
            return
        content = self.files.read(key, SOURCE, source.tokens, sum(sizes))
        if content is None:
            return
        slots = self._cache.reserve(source.seq_id, count)
        parts = [slots.slots, *slots.others]
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

    def _missing(self, search: Search, nodes: Sequence[PrefixNode]) -> list[Missing]:
        """Return what the longest prefix needs that is in files alone, in the order of reading."""
        places = {id(pool): place for place, pool in self._pools.items()}

        def is_here(pool: BlockPool, index: int) -> bool:
            return index < len(nodes) and pool.index.block(nodes[index]) is not None

        def is_known(pool: BlockPool, index: int) -> bool:
            if is_here(pool, index):
                return True
            place = places[id(pool)]
            return (index, place) not in search.failed and self.files.has(search.keys[index], place)

        longest = min(len(search.keys) * self._cache.block_size, len(search.tokens) - 1)
        length = self._cache.known(is_known, longest)
        return [
            (index, place)
            for place, pool in self._pools.items()
            for index in pool.needed(length)
            if not is_here(pool, index)
        ]

    def _insert(self, search: Search, nodes: list[PrefixNode], index: int, place: int, content: memoryview) -> int:
        """Fill a block with content and index it; the caller holds it. Nodes up to its own are added."""
        pool, tree = self._pools[place], self._cache.tree
        block = pool.allocate()
        self._storage.load(place, self._slots(place, block), content)
        while len(nodes) <= index:
            node = tree.child(nodes[-1] if nodes else tree.root(search.cache_salt), search.tokens, len(nodes))
            node.key = search.keys[len(nodes)]
            nodes.append(node)
        pool.index.insert(nodes[index], block)
        return block

    def _slots(self, place: int, block: int) -> Sequence[int]:
        """Return the slots of a block, or the number of a record."""
        size = 1 if place == STATES else self._cache.block_size
        return range(block * size, (block + 1) * size)
