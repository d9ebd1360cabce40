"""A block manager of small blocks: a sequence holds as many as its positions need, some shared with other sequences.

    sequence 1   [ b7 | b2 | b5 . . ]      . = room in its last block
    sequence 2   [ b7 | b2 | b9 . ]        b7 and b2 are shared: held by both, written by neither

A block with one holder that is not in the prefix index is writable. A sequence that writes into another block gets a
copy of it first (copy on write).

    free ---allocate---> held (count >= 1) ---free to 0---> free, or kept if it is indexed
      ^                    ^                                   |
      |                    +---------------share---------------+
      +------------------------evict (least recently used)-----+

The prefix index has full blocks by the tokens that they hold, so that other sequences can start from them. It is a
tree: a node is one full block, and its children are the blocks that followed it. A lookup compares a block's tokens,
not only a hash of them, and descends from the blocks before it. Each salt has a root of its own, so tenants share no
blocks.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from speculant.cache.base import NO_MOVES, Moves, Slots, require_path
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
        held = self._held.get(seq_id, _NOTHING)
        if not 0 <= n <= held.length:
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {held.length} positions")
        if n < held.length:
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


class BlockPool:
    """`num_blocks` blocks; unheld blocks in `index` are kept until the space is needed."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index, self._indexed = index, index.nodes
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, the kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Indexed blocks that no sequence holds."""
        return len(self._kept)

    def is_writable(self, block: int) -> bool:
        """Whether its holder may write to it: it has one holder and is not indexed."""
        return self._holders[block] == 1 and block not in self._indexed

    def is_kept(self, block: int) -> bool:
        """Whether it is indexed and not held, so that sharing it takes one of the free blocks."""
        return block in self._kept

    def allocate(self) -> int:
        """Take a free block, evicting the least recently used one if necessary; `num_free` must not be 0."""
        if not self._free:
            self._evict()
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a held or kept block."""
        self._kept.pop(block, None)
        self._holders[block] += 1

    def free(self, block: int) -> None:
        """Remove a holder from a held block."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._index:
                self._kept[block] = None
            else:
                self._free.append(block)

    def drop_kept(self) -> None:
        """Free every kept block. Blocks below one in the index are kept too, so that no held block leaves the index."""
        while self._kept:
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used block and its descendants from the index."""
        for block in self._index.remove(next(iter(self._kept))):
            if block in self._kept:
                del self._kept[block]
                self._free.append(block)

    def check(self, held: Mapping[int, int]) -> None:
        """Assert that the reference counts are `held` and that every block is in exactly one state."""
        counts = {block: count for block, count in enumerate(self._holders) if count}
        assert counts == dict(held), f"holders {counts} but {dict(held)} in tables"
        _assert_partition([self._free, self._kept, counts], self.num_blocks)
        assert all(block in self._index for block in self._kept), "a kept block is not indexed"
        assert not any(block in self._index for block in self._free), "a free block is indexed"


def _assert_partition(parts: Iterable[Iterable[int]], num_blocks: int) -> None:
    everywhere = sorted(block for part in parts for block in part)
    assert everywhere == list(range(num_blocks)), "a block is lost or doubled"


@dataclass(eq=False)
class PrefixNode:
    """One full block in the index. The root has no parent, no tokens and no block."""

    cache_salt: str
    parent: PrefixNode | None = None
    tokens: tuple[int, ...] = ()
    block: int | None = None
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)


class PrefixIndex:
    """Finds blocks by the tokens that they and all blocks before them hold. nodes: by block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str, PrefixNode] = {}
        self.nodes: dict[int, PrefixNode] = {}

    def __contains__(self, block: int) -> bool:
        return block in self.nodes

    def root(self, cache_salt: str) -> PrefixNode:
        """Return the root of a salt's prefixes."""
        return self._roots.setdefault(cache_salt, PrefixNode(cache_salt))

    def match(self, tokens: Sequence[int], cache_salt: str) -> list[PrefixNode]:
        """Return the nodes of the longest known prefix of `tokens`, in order."""
        found: list[PrefixNode] = []
        node = self._roots.get(cache_salt)
        while node is not None:
            node = node.children.get(self._tokens_of(tokens, len(found)))
            if node is not None:
                found.append(node)
        return found

    def insert(self, parent: PrefixNode, tokens: Sequence[int], index: int, block: int) -> PrefixNode:
        """Return the node of the `index`-th block of `tokens` below `parent`; a new node holds `block`."""
        own = self._tokens_of(tokens, index)
        known = parent.children.get(own)
        if known is not None:
            return known
        node = parent.children[own] = self.nodes[block] = PrefixNode(parent.cache_salt, parent, own, block)
        return node

    def remove(self, block: int) -> list[int]:
        """Remove a block's node and its descendants; return their blocks."""
        node = self.nodes[block]
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self._drop_root_if_empty(node.parent)
        removed = []
        for gone in list(_subtree(node)):
            assert gone.block is not None
            removed.append(gone.block)
            del self.nodes[gone.block]
        return removed

    def _drop_root_if_empty(self, node: PrefixNode) -> None:
        """Drop a root without children: clients choose the salts, and unused roots would pile up."""
        if node.parent is None and not node.children:
            del self._roots[node.cache_salt]

    def _tokens_of(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def check(self) -> None:
        """Assert that the tree and the table by block agree."""
        reached = {node.block: node for root in self._roots.values() for top in root.children.values()
                   for node in _subtree(top)}  # fmt: skip
        assert reached == self.nodes, "a block in the index can't be reached, or is reached twice"
        assert all(len(node.tokens) == self._block_size for node in reached.values()), "a block that is not full"


def _subtree(top: PrefixNode) -> Iterator[PrefixNode]:
    stack = [top]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
