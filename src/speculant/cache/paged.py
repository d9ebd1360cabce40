"""A block manager of small blocks: a sequence holds as many as its positions need, some shared with other sequences.

    sequence 1   [ b7 | b2 | b5 . . ]      . = room in its last block
    sequence 2   [ b7 | b2 | b9 . ]        b7 and b2 are shared: held by both, written by neither

A block with one holder that is not in the prefix index is writable. A sequence that writes into another block gets a
copy of it first (copy on write).

In layers with a window, blocks that no later row sees are given back. Their entries in the table are 0, so that a
position still has its block at position // block_size.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from speculant.cache.base import NO_MOVES, Moves, Slots, first_seen, require_path
from speculant.cache.pool import BlockPool
from speculant.cache.prefixes import PrefixIndex, PrefixNode, PrefixTree
from speculant.errors import CapacityError


@dataclass
class _Sequence:
    """One sequence's blocks, of which the first `given_back` are no longer its own; `prefix` are their nodes."""

    cache_salt: str
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    prefix: list[PrefixNode] = field(default_factory=list)
    given_back: int = 0
    table: array[int] | None = None  # its blocks, made on first use


_NOTHING = _Sequence("")  # an unknown sequence


class PagedBlockManager:
    """A `BlockManager` of `num_blocks` blocks of `block_size` positions, shared by copy on write.

    With `keep_prefixes` full committed blocks stay after their sequence until the space is needed, and
    other sequences may begin with them.
    window: the positions that a row of the layers sees, None = all. tree: the known prefixes, if other groups of layers
    have blocks of them too.
    """

    num_groups = 1

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        keep_prefixes: bool = True,
        window: int | None = None,
        tree: PrefixTree | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._keep_prefixes, self.window = keep_prefixes, window
        self._tree = tree or PrefixTree(block_size)
        self._index = PrefixIndex(self._tree, windowed=window is not None)
        self._pool = BlockPool(num_blocks, self._index)
        self._held: dict[int, _Sequence] = {}

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`."""
        held = self._held.get(seq_id) or _Sequence("")
        start, end = held.length, held.length + n
        if n == 0:
            return Slots(seq_id, start, ())
        moves, copies, more = NO_MOVES, self._copies(held), -(-end // self.block_size) - len(held.blocks)
        if copies or more:
            self._require(more + copies, seq_id)
            self._held[seq_id] = held
            moves = self._rearrange(held, start, (), [len(held.blocks) - 1]) if copies else NO_MOVES
            self._extend(held, more)
        held.length = end
        return Slots(seq_id, start, self._consecutive_slots(held, start, end), moves)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._held

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
        held = self._held.get(seq_id, _NOTHING)
        if not 0 <= n <= held.length:
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {held.length} positions")
        self._require_window(seq_id, n)
        if n < held.length:
            held.length = n
            self._unlist(held, n // self.block_size)
            self._drop_blocks(held, self._num_blocks_for(n))

    def holds_window(self, seq_id: int, n: int) -> bool:
        """See `BlockManager.holds_window`."""
        held = self._held.get(seq_id, _NOTHING)
        return n == 0 or held.given_back <= first_seen(self.window, n) // self.block_size

    def drop_unseen(self, seq_id: int) -> None:
        """See `BlockManager.drop_unseen`."""
        held = self._held.get(seq_id)
        if held is None or self.window is None:
            return
        first = first_seen(self.window, held.length) // self.block_size
        if first > held.given_back:
            for index in range(held.given_back, first):
                self._pool.free(held.blocks[index])
                held.blocks[index] = 0
            held.given_back, held.table = first, None

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> Moves:
        """See `BlockManager.compact`."""
        shared = self.check_compaction(seq_id, base, path)
        moves = NO_MOVES
        if path and path[-1] >= len(path):  # else they are in place
            moves = self._rearrange(self._held[seq_id], base, [base + node for node in path], shared)
        self.truncate_to(seq_id, base + len(path))
        return moves

    def check_compaction(self, seq_id: int, base: int, path: Sequence[int]) -> Sequence[int]:
        """Raise the errors of `compact`; return which blocks, by index in the table, are copied on write."""
        require_path(seq_id, self.length(seq_id), base, path)
        for n in (base, base + len(path)):
            self._require_window(seq_id, n)
        if not path or path[-1] < len(path):
            return ()
        held = self._held[seq_id]
        if held.given_back and not base:
            raise ValueError(f"compact(0) of sequence {seq_id}, which has given back its first positions")
        shared = self._shared(held, base, base + len(path))
        self._require(len(shared), seq_id, "has to move shared positions and needs")
        return shared

    def fork(self, src: int, dst: int) -> Moves:
        """See `BlockManager.fork`; blocks are copied when one of the two sequences writes to them."""
        if dst in self._held:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        if src in self._held:
            source = self._held[src]
            self._hold(dst, source.cache_salt, source.length, list(source.blocks), source.prefix, source.given_back)
        return NO_MOVES

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """See `BlockManager.match_prefix`; the sequence gets the salt even if no prefix matches."""
        return match_in_all([self], self._tree, seq_id, tokens, cache_salt, limit)

    def known(self, nodes: Sequence[PrefixNode], length: int) -> int:
        """Return `length`, or a shorter one, if the group lacks a block that a row after that many positions sees."""
        if self.window is None:
            return length
        for index in range(first_seen(self.window, length) // self.block_size, self._num_blocks_for(length)):
            if self._index.block(nodes[index]) is None:
                return index * self.block_size
        return length

    def adopt(self, seq_id: int, cache_salt: str, length: int, nodes: Sequence[PrefixNode]) -> None:
        """Give a new sequence the first `length` positions of a prefix that `known` has returned."""
        given_back = first_seen(self.window, length) // self.block_size
        used = nodes[given_back : self._num_blocks_for(length)]
        blocks = [0] * given_back + [self._block_of(node) for node in used]
        self._hold(seq_id, cache_salt, length, blocks, nodes[: length // self.block_size], given_back)

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `BlockManager.insert_prefix`; only full blocks are indexed, and an indexed one replaces an equal one.

        A sequence that holds an indexed block without a window thus holds all blocks before it, and none of them can be
        evicted.
        """
        held = self._held.get(seq_id)
        if held is None or not self._keep_prefixes:
            return
        for index in range(len(held.prefix), min(held.length, len(tokens)) // self.block_size):
            parent = held.prefix[-1] if held.prefix else self._tree.root(held.cache_salt)
            node = self._tree.child(parent, tokens, index)
            if index >= held.given_back:
                block = self._index.insert(node, held.blocks[index])
                if block != held.blocks[index]:
                    self._pool.share(block)
                    self._replace(held, index, block)
            node.users += 1
            held.prefix.append(node)

    def forget_prefixes(self) -> bool:
        """See `BlockManager.forget_prefixes`."""
        self._pool.drop_kept()
        return not self._index.nodes

    def release(self, seq_id: int) -> None:
        """See `BlockManager.release`."""
        if seq_id in self._held:
            held = self._held.pop(seq_id)
            self._drop_blocks(held, 0)
            self._unlist(held, 0)

    def free_tokens(self) -> int:
        """See `BlockManager.free_tokens`; blocks that no sequence holds count as free."""
        return self._pool.num_free * self.block_size

    def check(self) -> None:
        """See `BlockManager.check`."""
        self.check_blocks()
        self._tree.check(self.listed())

    def check_blocks(self) -> None:
        """Assert the integrity of all but the tree of prefixes, which other groups may use too."""
        self._pool.check(Counter(block for held in self._held.values() for block in held.blocks[held.given_back :]))
        self._index.check()
        for held in self._held.values():
            assert len(held.blocks) == self._num_blocks_for(held.length), "blocks that the length does not need"
            assert len(held.prefix) * self.block_size <= held.length, "a block was indexed before it was full"
            indexed = [self._index.block(node) for node in held.prefix[held.given_back :]]
            own = held.blocks[held.given_back : len(held.prefix)]
            assert indexed == own, "the index has another block than the sequence"
            assert held.given_back * self.block_size <= first_seen(self.window, held.length), "a block is missing"

    def lengths(self) -> list[tuple[int, int]]:
        """Return the sequences and their lengths."""
        return sorted((seq_id, held.length) for seq_id, held in self._held.items())

    def listed(self) -> list[PrefixNode]:
        """Return the nodes that sequences list, as often as they do."""
        return [node for held in self._held.values() for node in held.prefix]

    def _hold(
        self,
        seq_id: int,
        cache_salt: str,
        length: int,
        blocks: list[int],
        prefix: Sequence[PrefixNode],
        given_back: int,
    ) -> None:
        for block in blocks[given_back:]:
            self._pool.share(block)
        for node in prefix:
            node.users += 1
        self._held[seq_id] = _Sequence(cache_salt, length, blocks, list(prefix), given_back)

    def require(self, seq_id: int, n: int) -> None:
        """Raise the error of `reserve`, if any."""
        self._require(self.missing(seq_id, n), seq_id)

    def _require(self, missing: int, seq_id: int, why: str = "needs") -> None:
        if missing > self._pool.num_free:
            free = f"{self._pool.num_free} of {self.num_blocks} are free"
            kind = "" if self.window is None else f" for layers with a window of {self.window} positions"
            raise CapacityError(
                f"sequence {seq_id} {why} {missing} more cache blocks{kind} and {free}",
                "raise kv_memory, lower max_num_seqs, or wait for a request to end.",
            )

    def _require_window(self, seq_id: int, n: int) -> None:
        if not self.holds_window(seq_id, n):
            raise ValueError(f"sequence {seq_id} has given back positions that a row at position {n} sees")

    def _block_of(self, node: PrefixNode) -> int:
        block = self._index.block(node)
        assert block is not None, "a removed block was matched"
        return block

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
            self._unlist(held, index)
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
        while len(held.blocks) > max(keep, held.given_back):
            self._pool.free(held.blocks.pop())
            held.table = None
        if keep < held.given_back:
            held.blocks, held.given_back, held.table = [], 0, None

    def _unlist(self, held: _Sequence, keep: int) -> None:
        """List only the first `keep` nodes of a sequence's prefix; others stay in the index if they have blocks."""
        while len(held.prefix) > keep:
            node = held.prefix.pop()
            node.users -= 1
            if not node.blocks:
                self._tree.prune(node)

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


def match_in_all(
    managers: Sequence[PagedBlockManager],
    tree: PrefixTree,
    seq_id: int,
    tokens: Sequence[int],
    cache_salt: str,
    limit: int | None,
) -> int:
    """Give a new sequence the longest prefix that every group of layers knows; see `BlockManager.match_prefix`."""
    if seq_id in managers[0]:
        raise ValueError(f"match_prefix for sequence {seq_id}, which is already held")
    nodes = tree.match(tokens, cache_salt)
    most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
    length = max(0, min(len(nodes) * tree.block_size, most))
    while (shorter := min(manager.known(nodes, length) for manager in managers)) < length:
        length = shorter
    for manager in managers:
        manager.adopt(seq_id, cache_salt, length, nodes)
    return length
