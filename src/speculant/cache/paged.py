"""A block manager of small blocks: a sequence holds as many as its positions need, some shared with other sequences.

    sequence 1   [ b7 | b2 | b5 . . ]      . = room in its last block
    sequence 2   [ b7 | b2 | b9 . ]        b7 and b2 are shared: held by both, written by neither

A block with one holder that is not in the prefix index is writable. A sequence that writes into another block gets a
copy of it first (copy on write).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from speculant.cache.base import NO_MOVES, Moves, Slots, require_path
from speculant.cache.blocks import BlockPool
from speculant.cache.prefix import PrefixIndex, PrefixNode
from speculant.errors import CapacityError


@dataclass
class _Sequence:
    """One sequence's blocks. `prefix` are the index's nodes of its first blocks."""

    cache_salt: str
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    prefix: list[PrefixNode] = field(default_factory=list)
    table: array[int] | None = None  # its blocks, made on first use


_NOTHING = _Sequence("")  # an unknown sequence


class PagedBlockManager:
    """A `BlockManager` of `num_blocks` blocks of `block_size` positions, shared by copy on write.

    With `keep_prefixes` full committed blocks stay after their sequence until the space is needed, and
    other sequences may begin with them.
    """

    def __init__(self, num_blocks: int, block_size: int, keep_prefixes: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._keep_prefixes = keep_prefixes
        self._index = PrefixIndex(block_size)
        self._pool = BlockPool(num_blocks, self._index)
        self._held: dict[int, _Sequence] = {}

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`."""
        held = self._held.get(seq_id) or _Sequence("")
        start, end = held.length, held.length + n
        if n == 0:
            return Slots(seq_id, start, ())
        moves, copies, more = NO_MOVES, self._copies(held), self._num_blocks_for(end) - len(held.blocks)
        if copies or more:
            self._require(more + copies, f"sequence {seq_id} needs")
            self._held[seq_id] = held
            moves = self._rearrange(held, start, (), [len(held.blocks) - 1]) if copies else NO_MOVES
            self._extend(held, more)
        held.length = end
        return Slots(seq_id, start, self._consecutive_slots(held, start, end), moves)

    def plan(self) -> PagedPlan:
        """See `BlockManager.plan`."""
        return PagedPlan(self)

    def table(self, seq_id: int) -> array[int]:
        """See `BlockManager.table`."""
        held = self._held.get(seq_id) or _Sequence("")
        if held.table is None:
            held.table = array("q", held.blocks)
        return held.table

    def length(self, seq_id: int) -> int:
        """See `BlockManager.length`."""
        held = self._held.get(seq_id)
        return held.length if held else 0

    def truncate_to(self, seq_id: int, n: int) -> None:
        """See `BlockManager.truncate_to`: blocks from position n on are freed (docs/references.md, rollback)."""
        length = self.length(seq_id)
        if not 0 <= n <= length:
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {length} positions")
        if n < length:
            held = self._held[seq_id]
            held.length = n
            del held.prefix[n // self.block_size :]
            self._drop_blocks(held, self._num_blocks_for(n))

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> Moves:
        """See `BlockManager.compact`."""
        require_path(seq_id, self.length(seq_id), base, path)
        moves = NO_MOVES
        if path and path[-1] >= len(path):  # else they are in place
            held = self._held[seq_id]
            shared = self._shared(held, base, base + len(path))
            self._require(len(shared), f"sequence {seq_id} has to move shared positions and needs")
            moves = self._rearrange(held, base, [base + node for node in path], shared)
        self.truncate_to(seq_id, base + len(path))
        return moves

    def fork(self, src: int, dst: int) -> Moves:
        """See `BlockManager.fork`; blocks are copied when one of the two sequences writes to them."""
        if dst in self._held:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        if src in self._held:
            source = self._held[src]
            self._hold(dst, source.cache_salt, source.length, list(source.blocks), list(source.prefix))
        return NO_MOVES

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """See `BlockManager.match_prefix`; the sequence gets the salt even if no prefix matches."""
        if seq_id in self._held:
            raise ValueError(f"match_prefix for sequence {seq_id}, which is already held")
        nodes = self._index.match(tokens, cache_salt)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        length = max(0, min(len(nodes) * self.block_size, most))
        used = nodes[: self._num_blocks_for(length)]
        self._hold(seq_id, cache_salt, length, [_block_of(node) for node in used], nodes[: length // self.block_size])
        return length

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `BlockManager.insert_prefix`; only full blocks are indexed, and an indexed one replaces an equal one.

        A sequence that holds an indexed block thus holds all blocks before it, and none of them can be evicted.
        """
        held = self._held.get(seq_id)
        if held is None or not self._keep_prefixes:
            return
        for index in range(len(held.prefix), min(held.length, len(tokens)) // self.block_size):
            parent = held.prefix[-1] if held.prefix else self._index.root(held.cache_salt)
            node = self._index.insert(parent, tokens, index, held.blocks[index])
            if _block_of(node) != held.blocks[index]:
                self._pool.share(_block_of(node))
                self._replace(held, index, _block_of(node))
            held.prefix.append(node)

    def forget_prefixes(self) -> bool:
        """See `BlockManager.forget_prefixes`."""
        self._pool.drop_kept()
        return not self._index.nodes

    def release(self, seq_id: int) -> None:
        """See `BlockManager.release`."""
        if seq_id in self._held:
            self._drop_blocks(self._held.pop(seq_id), 0)

    def free_tokens(self) -> int:
        """See `BlockManager.free_tokens`; blocks that no sequence holds count as free."""
        return self._pool.num_free * self.block_size

    def check(self) -> None:
        """See `BlockManager.check`."""
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
        """Return how many blocks a sequence needs to grow by n positions, copies on write included."""
        if n == 0:
            return 0
        held = self._held.get(seq_id, _NOTHING)
        return -(-(held.length + n) // self.block_size) - len(held.blocks) + self._copies(held)

    def most(self, seq_id: int, num_blocks: int) -> int:
        """Return by how many positions a sequence can grow with `num_blocks` new blocks."""
        held = self._held.get(seq_id, _NOTHING)
        return max(0, (len(held.blocks) + num_blocks - self._copies(held)) * self.block_size - held.length)

    def _copies(self, held: _Sequence) -> int:
        """Return how many blocks are copied when the sequence grows: its last one, if that has room and is shared."""
        return 1 if held.length % self.block_size and not self._pool.is_writable(held.blocks[-1]) else 0

    def _shared(self, held: _Sequence, start: int, end: int) -> list[int]:
        """Return which held blocks, by index in the table, are touched by positions start to end and not writable."""
        touched = range(start // self.block_size, self._num_blocks_for(end))
        return [index for index in touched if not self._pool.is_writable(held.blocks[index])]

    def _rearrange(self, held: _Sequence, base: int, kept: Sequence[int], shared: Sequence[int]) -> Moves:
        """Copy on write: replace the `shared` blocks from `base` on by new ones; return the slots to move.

        Positions `kept` become base, base + 1, ...; positions below base keep their content.
        """
        first = min(base, shared[0] * self.block_size) if shared else base
        kept = [*range(first, base), *kept]
        sources = self._slots(held, kept)
        for index in reversed(shared):  # the last one first, as in _drop_blocks
            del held.prefix[index:]
            self._replace(held, index, self._pool.allocate())
        targets = self._slots(held, range(first, first + len(kept)))
        changed = [pair for pair in zip(sources, targets, strict=True) if pair[0] != pair[1]]
        return Moves([source for source, _ in changed], [target for _, target in changed])

    def _replace(self, held: _Sequence, index: int, block: int) -> None:
        """Replace the block at this index of the table."""
        self._pool.free(held.blocks[index])
        held.blocks[index] = block
        held.table = None

    def _extend(self, held: _Sequence, more: int) -> None:
        if more > 0:
            held.blocks += [self._pool.allocate() for _ in range(more)]
            held.table = None

    def _drop_blocks(self, held: _Sequence, keep: int) -> None:
        """Free all blocks but the first `keep`, the last one first: a prefix's end is evicted before its start."""
        while len(held.blocks) > keep:
            self._pool.free(held.blocks.pop())
            held.table = None

    def _slots(self, held: _Sequence, positions: Iterable[int]) -> list[int]:
        """Return the slots of a sequence's positions."""
        size, blocks = self.block_size, held.blocks
        return [blocks[position // size] * size + position % size for position in positions]

    def _consecutive_slots(self, held: _Sequence, start: int, end: int) -> list[int]:
        """Return the slots of positions start to end - 1, block by block."""
        size, slots = self.block_size, list[int]()
        index, offset = divmod(start, size)
        left = end - start
        while offset + left > size:
            first = held.blocks[index] * size
            slots += range(first + offset, first + size)
            index, offset, left = index + 1, 0, left - size + offset
        first = held.blocks[index] * size + offset
        slots += range(first, first + left)
        return slots

    def _num_blocks_for(self, n: int) -> int:
        return -(-n // self.block_size)


class PagedPlan:
    """A `ReservationPlan`: the blocks that are left when everything taken so far has been reserved."""

    def __init__(self, manager: PagedBlockManager) -> None:
        self._manager = manager
        self._num_free = manager.free_tokens() // manager.block_size
        self._taken: dict[int, tuple[int, int]] = {}  # positions, and the blocks that they need

    def room(self, seq_id: int) -> int:
        """See `ReservationPlan.room`."""
        taken, blocks = self._taken.get(seq_id, (0, 0))
        return self._manager.most(seq_id, self._num_free + blocks) - taken

    def take(self, seq_id: int, n: int) -> bool:
        """See `ReservationPlan.take`."""
        taken, blocks = self._taken.get(seq_id, (0, 0))
        needed = self._manager.missing(seq_id, taken + n)
        if needed - blocks > self._num_free:
            return False
        self._num_free -= needed - blocks
        self._taken[seq_id] = taken + n, needed
        return True


def _block_of(node: PrefixNode) -> int:
    assert node.block is not None, "a removed node was matched"
    return node.block
