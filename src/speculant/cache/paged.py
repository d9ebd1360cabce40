"""A cache of small blocks: a sequence owns as many as it fills, and shares those that others hold too.

    sequence 1   [ b7 | b2 | b5 . . ]      . = room in its last block
    sequence 2   [ b7 | b2 | b9 . ]        b7 and b2 are shared: held by both, written by neither

A block is written only by its one holder. Whoever has to write into a shared block, or into one that the
prefix index knows, gets a copy first (copy on write).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculant.cache.base import BlockTable, CacheShape, Slots, require_path
from speculant.cache.blocks import BlockPool
from speculant.cache.prefix import PrefixIndex, PrefixNode
from speculant.cache.storage import Storage
from speculant.errors import CapacityError
from speculant.tree import ids


@dataclass
class _Sequence:
    """What one sequence holds. `prefix` are the index's nodes of its first blocks."""

    cache_salt: str
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    prefix: list[PrefixNode] = field(default_factory=list)
    table: Tensor | None = None  # its blocks, made when they are asked for
    rows: Tensor | None = None  # theirs, and perhaps those of blocks that were given back


_NOTHING = _Sequence("")  # what an unknown sequence holds


class PagedKVCache:
    """`num_blocks` blocks of `block_size` positions, shared by copy on write.

    With `keep_prefixes` full committed blocks outlive their sequence until the space is needed, and
    other sequences may begin with them.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, keep_prefixes: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._keep_prefixes = keep_prefixes
        self._storage = Storage(shape, num_blocks * block_size, "lower kv_memory.")
        self._offsets = torch.arange(block_size, device=shape.device)
        self._index = PrefixIndex(block_size)
        self._pool = BlockPool(num_blocks, self._index)
        self._held: dict[int, _Sequence] = {}

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `KVCache.reserve`."""
        held = self._held.get(seq_id) or _Sequence("")
        start, end = held.length, held.length + n
        if n == 0:
            return Slots(seq_id, start, (), self._offsets.device)
        foreign = self._foreign(held, start, end)
        self._require(self._num_blocks_for(end) - len(held.blocks) + len(foreign), f"sequence {seq_id} needs")
        self._held[seq_id] = held
        self._own(held, foreign)
        self._extend(held, end)
        held.length = end
        size = self.block_size
        places = [held.blocks[position // size] * size + position % size for position in range(start, end)]
        return Slots(seq_id, start, places, self._offsets.device)

    def plan(self) -> PagedPlan:
        """See `KVCache.plan`."""
        return PagedPlan(self)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVCache.write`."""
        self._storage.write(layer, rows, keys, values)

    def read(self, layer: int, seq_id: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.read`: gathered row by row, for kernels that can't walk the table."""
        held = self._held[seq_id]
        rows = self._rows(held)[: held.length]
        keys, values = self._storage.layer(layer)
        return keys.index_select(0, rows), values.index_select(0, rows)

    def table(self, seq_id: int) -> BlockTable:
        """See `KVCache.table`."""
        return BlockTable(self._table(self._held.get(seq_id) or _Sequence("")), self.block_size)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.layer`."""
        return self._storage.layer(layer)

    def length(self, seq_id: int) -> int:
        """See `KVCache.length`."""
        held = self._held.get(seq_id)
        return held.length if held else 0

    def truncate_to(self, seq_id: int, n: int) -> None:
        """See `KVCache.truncate_to`; blocks that begin at n or later are given back (docs/references.md, rollback)."""
        if not 0 <= n <= self.length(seq_id):
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {self.length(seq_id)} positions")
        if seq_id in self._held:
            held = self._held[seq_id]
            held.length = n
            del held.prefix[n // self.block_size :]
            self._drop_blocks(held, self._num_blocks_for(n))

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """See `KVCache.compact`."""
        require_path(seq_id, self.length(seq_id), base, path)
        if list(path) != list(range(len(path))):
            held, end = self._held[seq_id], base + len(path)
            foreign = self._foreign(held, base, end)
            self._require(len(foreign), f"sequence {seq_id} has to move shared positions and needs")
            self._own(held, foreign)
            rows = self._rows(held)
            self._storage.move(rows[base + torch.tensor(path, device=rows.device)], rows[base:end])
        self.truncate_to(seq_id, base + len(path))

    def fork(self, src: int, dst: int) -> None:
        """See `KVCache.fork`; nothing is copied until one of the two writes."""
        if dst in self._held:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        if src in self._held:
            source = self._held[src]
            self._hold(dst, source.cache_salt, source.length, list(source.blocks), list(source.prefix))

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> int:
        """See `KVCache.match_prefix`; `seq` keeps the salt, found or not."""
        if seq_id in self._held:
            raise ValueError(f"match_prefix for sequence {seq_id}, which is already held")
        nodes = self._index.match(tokens, cache_salt)
        length = max(0, min(len(nodes) * self.block_size, len(tokens) - 1))
        used = nodes[: self._num_blocks_for(length)]
        self._hold(seq_id, cache_salt, length, [_block_of(node) for node in used], nodes[: length // self.block_size])
        return length

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `KVCache.insert_prefix`; full blocks alone are indexed, and a known one takes the place of its like.

        So whoever holds a block of the index holds all blocks before it, and none of them can be evicted.
        """
        held = self._held.get(seq_id)
        if held is None or not self._keep_prefixes:
            return
        for place in range(len(held.prefix), min(held.length, len(tokens)) // self.block_size):
            parent = held.prefix[-1] if held.prefix else self._index.root(held.cache_salt)
            node = self._index.insert(parent, tokens, place, held.blocks[place])
            if _block_of(node) != held.blocks[place]:
                self._pool.share(_block_of(node))
                self._replace(held, place, _block_of(node))
            held.prefix.append(node)

    def release(self, seq_id: int) -> None:
        """See `KVCache.release`."""
        if seq_id in self._held:
            self._drop_blocks(self._held.pop(seq_id), 0)

    def free_tokens(self) -> int:
        """See `KVCache.free_tokens`; prefixes that nobody holds count as free."""
        return self._pool.num_free * self.block_size

    def check(self) -> None:
        """See `KVCache.check`."""
        self._pool.check(Counter(block for held in self._held.values() for block in held.blocks))
        self._index.check()
        for held in self._held.values():
            assert len(held.blocks) == self._num_blocks_for(held.length), "blocks that the length does not need"
            assert len(held.prefix) * self.block_size <= held.length, "a block was indexed before it was full"
            indexed = [node.block for node in held.prefix]
            assert indexed == held.blocks[: len(indexed)], "the index has another block than the sequence"

    def _hold(self, seq_id: int, cache_salt: str, length: int, blocks: list[int], prefix: list[PrefixNode]) -> None:
        for block in blocks:
            self._pool.share(block)
        self._held[seq_id] = _Sequence(cache_salt, length, blocks, prefix)

    def _require(self, missing: int, who: str) -> None:
        if missing > self._pool.num_free:
            raise CapacityError(
                f"{who} {missing} more cache blocks and {self._pool.num_free} of {self.num_blocks} are free",
                "raise kv_memory, lower max_num_seqs, or wait for a request to end.",
            )

    def missing(self, seq_id: int, n: int) -> int:
        """Return how many blocks have to be allocated before `seq` can grow by n positions, copies included."""
        if n == 0:
            return 0
        held = self._held.get(seq_id, _NOTHING)
        end = held.length + n
        return self._num_blocks_for(end) - len(held.blocks) + len(self._foreign(held, held.length, end))

    def most(self, seq_id: int, num_blocks: int) -> int:
        """Return by how many positions `seq` could grow with that many newly allocated blocks."""
        held = self._held.get(seq_id, _NOTHING)
        copies = len(self._foreign(held, held.length, held.length + 1))
        return max(0, (len(held.blocks) + num_blocks - copies) * self.block_size - held.length)

    def _foreign(self, held: _Sequence, start: int, end: int) -> list[int]:
        """Return the places of held blocks that positions from start to end touch and that must not be written."""
        touched = range(start // self.block_size, min(self._num_blocks_for(end), len(held.blocks)))
        return [place for place in touched if not self._pool.is_writable(held.blocks[place])]

    def _own(self, held: _Sequence, foreign: Sequence[int]) -> None:
        """Replace blocks that must not be written by copies, the last one first like all that is given back."""
        for place in reversed(foreign):
            shared, own = held.blocks[place], self._pool.allocate()
            self._storage.move(shared * self.block_size + self._offsets, own * self.block_size + self._offsets)
            del held.prefix[place:]
            self._replace(held, place, own)

    def _replace(self, held: _Sequence, place: int, block: int) -> None:
        """Hold another block, of the same content, in this place."""
        self._pool.free(held.blocks[place])
        held.blocks[place] = block
        held.table = held.rows = None

    def _extend(self, held: _Sequence, end: int) -> None:
        missing = self._num_blocks_for(end) - len(held.blocks)
        if missing > 0:
            held.blocks += [self._pool.allocate() for _ in range(missing)]
            held.table = held.rows = None

    def _drop_blocks(self, held: _Sequence, keep: int) -> None:
        """Give back all blocks but the first `keep`, the last one first: a prefix's end is evicted before its start."""
        while len(held.blocks) > keep:
            self._pool.free(held.blocks.pop())
            held.table = None

    def _table(self, held: _Sequence) -> Tensor:
        """Return a sequence's blocks."""
        if held.table is None:
            held.table = ids(held.blocks).to(self._offsets.device)
        return held.table

    def _rows(self, held: _Sequence) -> Tensor:
        """Return the rows of a sequence's blocks, in order of position; at least `length` of them."""
        if held.rows is None:
            held.rows = (self._table(held)[:, None] * self.block_size + self._offsets).flatten()
        return held.rows

    def _num_blocks_for(self, n: int) -> int:
        return -(-n // self.block_size)


class PagedPlan:
    """A `ReservationPlan`: the blocks that are left when everything taken so far has been reserved."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._num_free = cache.free_tokens() // cache.block_size
        self._taken: dict[int, int] = {}

    def room(self, seq_id: int) -> int:
        """See `ReservationPlan.room`."""
        taken = self._taken.get(seq_id, 0)
        return self._cache.most(seq_id, self._num_free + self._cache.missing(seq_id, taken)) - taken

    def take(self, seq_id: int, n: int) -> bool:
        """See `ReservationPlan.take`."""
        taken = self._taken.get(seq_id, 0)
        more = self._cache.missing(seq_id, taken + n) - self._cache.missing(seq_id, taken)
        if more > self._num_free:
            return False
        self._num_free -= more
        self._taken[seq_id] = taken + n
        return True


def _block_of(node: PrefixNode) -> int:
    assert node.block is not None, "a search found a node that was removed"
    return node.block
