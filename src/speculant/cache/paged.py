"""The KV cache: each sequence holds as many blocks as its positions need, some shared with other sequences.

    sequence 1   [ b7 | b2 | b5 . . ]      . = room in its last block
    sequence 2   [ b7 | b2 | b9 . ]        b7 and b2 are shared: held by both, written by neither

A block with one holder that is not in the prefix index is writable. A sequence that writes into another block gets a
copy of it first (copy on write).

In layers with a window, blocks that no later row sees are given back. Their entries in the table are 0, so that a
position still has its block at position // block_size:

    no window   [ b7 | b2 | b5 | b1 . ]
    window      [  0 |  0 | b4 | b6 . ]     0 = given back; nothing reads it

A sequence has the same length in every group of layers. The first group keeps the most positions and decides how much
room there is. A later group needs no more blocks than the first: if sequences share a block of the first group, they
share that of a later group or have given it back. So a later group with as many blocks is never full before the first.
It may have fewer if they suffice for all that can be in use at once.

The prefix index: full committed blocks by the tokens that they hold, so that other sequences can start from them.

The tokens are a tree: a node is one full block's tokens, and its children are those that followed it. A lookup compares
the tokens, not only a hash of them, and descends from the blocks before it. Each salt has a root of its own, so tenants
share no blocks.

    node        tokens 0 - 3 ---- tokens 4 - 7 ---- tokens 8 - 11      one tree for all groups of layers
    no window   b7                b2                b5
    window      .                 b4                b6                 . = evicted: a prefix can begin without it

Groups of layers index their blocks in one tree. A node stays as long as it has a block, a child or a sequence that
lists it. In a group without a window a block serves nobody without all blocks before it: when it is evicted, its node
goes, and all nodes below it.

Layers with a state: a sequence has a record in each of them (`StateShape`), all under one number. A record is written
once, by the pass that adds rows to the state; then only the updates of later rows are added. So a sequence holds two:

    pass        record     contains the state of      and updates of
    5 rows      r4         positions 0 - 4            .
    1 + 3       r1         positions 0 - 5            positions 6, 7, 8, which are drafted     r4 is held until
    1 + 3       r4         positions 0 - 8            positions 9, 10, 11                      the next pass

Each pass reads the newest record and writes the other one. The one that it read serves again if the pass fails.
A pass of drafted rows alone adds their updates to the newest record, if it has room for them and nobody shares it.
Records of states at the ends of blocks are in the prefix index too, as the blocks of a group of layers are.

Encoded sources in a cache: each is a sequence of its own, which texts with the same source and salt share.

    texts     seq 1 ───┐          seq 2 ───┐   seq 3 ───┐
    sources            └─── -1001 ─────────┘            └─── -1002

Their ids are negative. A source is encoded as a whole, so it
has no positions in the cache, or all. It is released with the last text that holds it.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from speculant.cache.base import MOST_PENDING, NO_RECORD, CacheShape, KVStorage, Moves, Slots, StateRows
from speculant.errors import CapacityError

if TYPE_CHECKING:
    from torch import Tensor

    from speculant.cache.stored import StoredPrefixes


def first_seen(window: int | None, length: int) -> int:
    """Return the first position that a row at position `length` sees, and so does any later row."""
    return 0 if window is None else max(0, length - window + 1)


@dataclass(eq=False)
class PrefixNode:
    """The tokens of one full block. The root of a salt has no parent and no tokens.

    blocks: the group's block that holds these tokens, by index. users: how many sequences list the node, by group.
    key: of its files on disk; empty = not made yet.
    """

    cache_salt: str
    parent: PrefixNode | None = None
    tokens: tuple[int, ...] = ()
    blocks: dict[PrefixIndex, int] = field(default_factory=dict)
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    users: int = 0
    key: bytes = b""


class PrefixTree:
    """The known prefixes, in steps of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, PrefixNode] = {}

    def root(self, cache_salt: str) -> PrefixNode:
        """Return the root of a salt's prefixes."""
        return self._roots.setdefault(cache_salt, PrefixNode(cache_salt))

    def match(self, tokens: Sequence[int], cache_salt: str) -> list[PrefixNode]:
        """Return the nodes of the longest known prefix of `tokens`, in order."""
        found: list[PrefixNode] = []
        node = self._roots.get(cache_salt)
        while node is not None:
            node = node.children.get(self.tokens_of(tokens, len(found)))
            if node is not None:
                found.append(node)
        return found

    def child(self, parent: PrefixNode, tokens: Sequence[int], index: int) -> PrefixNode:
        """Return the node of the `index`-th block of `tokens` below `parent`; make it if it is unknown."""
        own = self.tokens_of(tokens, index)
        node = parent.children.get(own)
        if node is None:
            node = parent.children[own] = PrefixNode(parent.cache_salt, parent, own)
        return node

    def prune(self, node: PrefixNode) -> None:
        """Drop a node that serves nobody, and those above it that served it alone.

        Clients choose the salts, and unused roots would pile up.
        """
        parent = node.parent
        while parent is not None and not (node.blocks or node.children or node.users):
            del parent.children[node.tokens]
            node, parent = parent, parent.parent
        if parent is None and not node.children:
            self._roots.pop(node.cache_salt, None)

    def cut(self, node: PrefixNode) -> list[PrefixNode]:
        """Drop a node and its descendants; return them."""
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self.prune(node.parent)
        return list(_subtree(node))

    def check(self, listed: Iterable[PrefixNode]) -> None:
        """Assert that every node serves somebody; `listed` are those that sequences list, as often as they do."""
        users = Counter(listed)
        for node in self.nodes():
            assert node.users == users.pop(node, 0), "a node counts other sequences than those that list it"
            assert node.blocks or node.children or node.users, "a node that serves nobody"
            assert len(node.tokens) == self.block_size, "a block that is not full"
        assert not users, "a sequence lists a node that is not in the tree"

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield every node but the roots."""
        for root in self._roots.values():
            for top in root.children.values():
                yield from _subtree(top)

    def tokens_of(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the tokens of a text's block."""
        return tuple(tokens[index * self.block_size : (index + 1) * self.block_size])


class PrefixIndex:
    """The blocks of one group of layers in a tree. nodes: by block.

    window: the positions that a row of the group's layers sees, None = all. With a window a block serves without those
    before it. on_inserted: if there is one, it is called for a block that enters. on_removed: for one that leaves with
    the whole prefix.
    """

    def __init__(self, tree: PrefixTree, window: int | None = None) -> None:
        self.tree, self.window = tree, window
        self.nodes: dict[int, PrefixNode] = {}
        self.on_inserted: Callable[[PrefixNode, int], None] | None = None
        self.on_removed: Callable[[int], None] = lambda block: None

    def __contains__(self, block: int) -> bool:
        return block in self.nodes

    def block(self, node: PrefixNode) -> int | None:
        """Return the group's block of a node, if it has one."""
        return node.blocks.get(self)

    def holds(self, node: PrefixNode) -> bool:
        """Whether the index has a block of a node, which may have been removed."""
        return self.nodes.get(node.blocks.get(self, -1)) is node

    def insert(self, node: PrefixNode, block: int) -> int:
        """Return the group's block of a node, which is `block` if it had none."""
        known = node.blocks.setdefault(self, block)
        if known == block:
            self.nodes[block] = node
            if self.on_inserted is not None:
                self.on_inserted(node, block)
        return known

    def remove(self, block: int) -> list[int]:
        """Remove a block, and all blocks that serve nobody without it; return those of this group."""
        node = self.nodes[block]
        if self.window is not None:
            del self.nodes[block], node.blocks[self]
            self.tree.prune(node)
            return [block]
        gone = self.tree.cut(node)
        for each in gone:
            for index, own in each.blocks.items():
                del index.nodes[own]
                if index is not self:
                    index.on_removed(own)
        return [each.blocks[self] for each in gone]

    def check(self) -> None:
        """Assert that the tree and the table by block agree."""
        reached = {node.blocks[self]: node for node in self.tree.nodes() if self in node.blocks}
        assert reached == self.nodes, "a block in the index can't be reached, or is reached twice"
        assert self.window is not None or len(reached) == len([*self.tree.nodes()]), "a prefix with a gap"


def _subtree(top: PrefixNode) -> Iterator[PrefixNode]:
    stack = [top]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node


class BlockPool:
    """The blocks of one group of layers: which are free, which are held, and which are kept for later.

    free ---allocate---> held (count >= 1) ---free to 0---> free, or kept if it is in `index`
      ^                    ^                                   |
      |                    +---------------share---------------+
      +------------------------evict (least recently used)-----+
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks, self.index = num_blocks, index
        self.window, self.block_size = index.window, index.tree.block_size
        self._indexed = index.nodes
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._kept: OrderedDict[int, float] = OrderedDict()  # the least recently used first, and since when
        self.evicted_until = 0.0  # what was kept since then, by time.monotonic, was evicted last
        self.num_free = num_blocks  # blocks that can be allocated, the kept ones included
        index.on_removed = self._forget

    @property
    def num_kept(self) -> int:
        """Indexed blocks that no sequence holds."""
        return len(self._kept)

    def needed(self, length: int) -> range:
        """Return which blocks of a text a row at position `length` sees, by number."""
        return range(first_seen(self.window, length) // self.block_size, -(-length // self.block_size))

    def known(self, has: Callable[[BlockPool, int], bool], length: int) -> int:
        """Return `length`, or a shorter one, if the group lacks a block that a row after that many positions sees.

        has: whether it has the block of a number.
        """
        if self.window is not None:
            for index in self.needed(length):
                if not has(self, index):
                    return index * self.block_size
        return length

    def is_writable(self, block: int, others: int = 0) -> bool:
        """Whether its holder may write to it: it is not indexed, and all its other holders will have copied it.

        others: the number of other holders that get copies before.
        """
        return block not in self._indexed and self._holders[block] - others <= 1

    def is_kept(self, block: int) -> bool:
        """Whether it is indexed and not held, so that sharing it takes one of the free blocks."""
        return block in self._kept

    def allocate(self) -> int:
        """Take a free block, evicting the least recently used one if necessary; `num_free` must not be 0."""
        if not self._free:
            self._evict()
        block = self._free.pop()
        self._holders[block], self.num_free = 1, self.num_free - 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a held or kept block."""
        if block in self._kept:
            del self._kept[block]
            self.num_free -= 1
        self._holders[block] += 1

    def free(self, block: int) -> None:
        """Remove a holder from a held block."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self.num_free += 1
            if block in self._indexed:
                self._kept[block] = time.monotonic()
            else:
                self._free.append(block)

    def drop_kept(self) -> None:
        """Free every kept block. Blocks below one in the index are kept too, so that no held block leaves the index."""
        while self._kept:
            self._evict()

    def shortage(self, missing: int, seq_id: int, why: str = "needs") -> CapacityError:
        """Return the error of a sequence that needs more blocks than are free."""
        kind = "" if self.window is None else f" for layers with a window of {self.window} positions"
        return CapacityError(
            f"sequence {seq_id} {why} {missing} more cache blocks{kind} and "
            f"{self.num_free} of {self.num_blocks} are free",
            "raise kv_memory, lower max_num_seqs, or wait for a request to end.",
        )

    def _evict(self) -> None:
        """Remove the least recently used block and its descendants from the index."""
        block, self.evicted_until = next(iter(self._kept.items()))
        self.drop(block)

    def drop(self, block: int) -> None:
        """Remove a kept block and its descendants from the index."""
        for gone in self.index.remove(block):
            self._forget(gone)

    def _forget(self, block: int) -> None:
        """Free a block that left the index, unless a sequence holds it."""
        if block in self._kept:
            del self._kept[block]
            self._free.append(block)

    def check(self, held: Mapping[int, int]) -> None:
        """Assert that the reference counts are `held` and that every block is in exactly one state."""
        counts = {block: count for block, count in enumerate(self._holders) if count}
        assert counts == dict(held), f"holders {counts} but {dict(held)} in tables"
        assert self.num_free == len(self._free) + len(self._kept), "the free blocks are miscounted"
        everywhere = sorted(block for part in (self._free, self._kept, counts) for block in part)
        assert everywhere == list(range(self.num_blocks)), "a block is lost or doubled"
        assert self._kept.keys() <= self._indexed.keys(), "a kept block is not indexed"
        assert self._indexed.keys().isdisjoint(self._free), "a free block is indexed"
        self.index.check()


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one group of layers, of which the first `given_back` are no longer its own."""

    pool: BlockPool
    blocks: list[int] = field(default_factory=list)
    given_back: int = 0

    def missing(self, length: int, n: int) -> int:
        """Return how many blocks are needed to grow from `length` by n > 0 positions, copies on write included."""
        size = self.pool.block_size
        missing = -(-(length + n) // size) - len(self.blocks)
        return missing + 1 if length % size and not self.pool.is_writable(self.blocks[-1]) else missing

    def shared(self, start: int, end: int) -> list[int]:
        """Return which blocks, by index, are touched by positions start to end - 1 and not writable."""
        touched = range(start // self.pool.block_size, -(-end // self.pool.block_size))
        return [index for index in touched if not self.pool.is_writable(self.blocks[index])]

    def replace(self, index: int, block: int) -> None:
        """Hold another block in the place of the one at this index."""
        self.pool.free(self.blocks[index])
        self.blocks[index] = block

    def rearrange(self, base: int, kept: Sequence[int], shared: Sequence[int]) -> Moves:
        """Copy on write: replace the `shared` blocks from `base` on by new ones; return the slots to move.

        Positions `kept` become base, base + 1, ...; positions below base keep their content.
        """
        first = min(base, shared[0] * self.pool.block_size) if shared else base
        kept = [*range(first, base), *kept]
        sources = self._slots(kept)
        for index in reversed(shared):  # the last one first, as in `drop`
            self.replace(index, self.pool.allocate())
        targets = self._slots(range(first, first + len(kept)))
        changed = [pair for pair in zip(sources, targets, strict=True) if pair[0] != pair[1]]
        return Moves([source for source, _ in changed], [target for _, target in changed])

    def drop(self, keep: int) -> None:
        """Free all blocks but the first `keep`, the last one first: a prefix's end is evicted before its start."""
        while len(self.blocks) > max(keep, self.given_back):
            self.pool.free(self.blocks.pop())
        if keep < self.given_back:
            self.blocks, self.given_back = [], 0

    def drop_unseen(self, length: int) -> bool:
        """Give back the blocks that a row at position `length` does not see; return whether there were any."""
        first, before = first_seen(self.pool.window, length) // self.pool.block_size, self.given_back
        if first <= before:
            return False
        for index in range(before, first):
            self.pool.free(self.blocks[index])
            self.blocks[index] = 0
        self.given_back = first
        return True

    def copy(self) -> BlockTable:
        """Return a table that shares all blocks."""
        for block in self.blocks[self.given_back :]:
            self.pool.share(block)
        return BlockTable(self.pool, list(self.blocks), self.given_back)

    def slots(self, start: int, end: int) -> list[int]:
        """Return the slots of positions start to end - 1, block by block."""
        size, slots = self.pool.block_size, list[int]()
        index, offset = divmod(start, size)
        left = end - start
        while offset + left > size:
            first = self.blocks[index] * size
            slots += range(first + offset, first + size)
            index, offset, left = index + 1, 0, left - size + offset
        first = self.blocks[index] * size + offset
        slots += range(first, first + left)
        return slots

    def _slots(self, positions: Iterable[int]) -> list[int]:
        """Return the slots of any positions."""
        size, blocks = self.pool.block_size, self.blocks
        return [blocks[position // size] * size + position % size for position in positions]


class Record(NamedTuple):
    """A record of a sequence: its number, and the positions whose state it contains.

    end: it has the updates of positions from `settled` to here; None = of all that the sequence holds.
    """

    number: int
    settled: int
    end: int | None = None

    def holds(self, n: int) -> bool:
        """Whether a pass can begin at position n."""
        return self.settled <= n and (self.end is None or n <= self.end)


@dataclass(slots=True)
class CachedSequence:
    """A sequence's length, and its table for each group of layers; `prefix` are the nodes of its first full blocks.

    record, before: the newest record of its states, and the one that the last pass read; None = there is none. saved:
    records at the ends of blocks that are not in the prefix index yet. border: the number of
    blocks before the newest record that was saved while the text was written; 0 = there is none. parting: where the
    text begins to differ from known ones, if no record holds the state there; else 0.
    """

    cache_salt: str
    tables: list[BlockTable]
    length: int = 0
    prefix: list[PrefixNode] = field(default_factory=list)
    table: array[int] | None = None  # the tables in one, made on first use
    record: Record | None = None
    before: Record | None = None
    saved: list[Record] = field(default_factory=list)
    border: int = 0
    parting: int = 0

    @property
    def records(self) -> list[Record]:
        """All that it holds."""
        return [each for each in (self.record, self.before, *self.saved) if each is not None]


class RecordPool(BlockPool):
    """The records of sequences' states, and those that prefixes begin with. spare: the most that are saved in a pass.

    A sequence needs two.
    """

    def __init__(self, num_records: int, spare: int, tree: PrefixTree) -> None:
        super().__init__(num_records, PrefixIndex(tree, 0))
        self.spare = spare

    def advance(self, held: CachedSequence, start: int, certain: int) -> StateRows:
        """See `KVCache.advance`."""
        own, end = held.record, start + certain
        number, settled = (NO_RECORD, 0) if own is None else own[:2]
        if not certain and own is not None and self.is_writable(number) and held.length - settled <= MOST_PENDING:
            return StateRows(number, settled, NO_RECORD, 0)
        waiting = max(start - settled, held.length - end)
        if waiting > MOST_PENDING:
            raise ValueError(f"{waiting} rows wait for the state, and {MOST_PENDING} can")
        if held.before is not None:
            self.free(held.before.number)
        held.before, border = own and own._replace(end=start), (end - 1) // self.block_size * self.block_size
        border = end if end == held.parting else border  # others will begin there with tokens of their own
        save = NO_RECORD
        if certain and border and settled <= border:
            save = self._save(held, border, is_newest=certain == 1)
        held.record = Record(self.allocate(), end)
        return StateRows(number, settled, held.record.number, certain, save, border)

    def _save(self, held: CachedSequence, border: int, *, is_newest: bool) -> int:
        """Return a record for the state at the end of a block; NO_RECORD if it is known, or there is none to spare.

        is_newest: it follows a text's newest token; the last one that did is of no more use.
        """
        index = border // self.block_size - 1
        known = index < len(held.prefix) and self.index.block(held.prefix[index]) is not None
        if known or not self.spare or any(each.settled == border for each in held.saved):
            return NO_RECORD
        self.spare -= 1
        held.saved.append(Record(self.allocate(), border))
        if is_newest:
            for node in held.prefix[held.border - 1 : held.border]:
                last = self.index.block(node)
                if last is not None and self.is_kept(last):
                    self.drop(last)
            held.border = index + 1
        return held.saved[-1].number

    def index_saved(self, held: CachedSequence) -> None:
        """Add saved records to the prefix index, whose nodes the sequence lists; others are of no use."""
        for number, settled, _ in held.saved:
            if settled // self.block_size <= len(held.prefix):
                self.index.insert(held.prefix[settled // self.block_size - 1], number)
        self._free_saved(held)

    def truncate(self, held: CachedSequence, n: int) -> int:
        """Go back to the state before position n, or to that of the longest known prefix; return its position."""
        before, at = held.before, n
        if held.record is None:
            return 0
        if before is not None and before.holds(n):  # the pass after it may have been one of a part of the layers
            self.free(held.record.number)
            held.record, held.before = before._replace(end=None), None
        elif n and held.record.holds(n):
            return n
        else:
            self.release(held)
            at = self.known(indexed(held.prefix), min(n, len(held.prefix) * self.block_size))
            self.hold(held, held.prefix, at)
        self._free_saved(held)
        return at

    @override
    def needed(self, length: int) -> range:
        """Return the number of the block whose end has the state; none for length 0."""
        return range(max(0, length // self.block_size - 1), length // self.block_size)

    @override
    def known(self, has: Callable[[BlockPool, int], bool], length: int) -> int:
        """Return the end of the last block within `length` positions whose state is known; 0 = none is."""
        for index in range(length // self.block_size, 0, -1):
            if has(self, index - 1):
                return index * self.block_size
        return 0

    def hold(self, held: CachedSequence, nodes: Sequence[PrefixNode], length: int) -> None:
        """Let a sequence begin with the state of a prefix."""
        number = self.index.block(nodes[length // self.block_size - 1]) if length else None
        held.record = None if number is None else Record(number, length)
        if number is not None:
            self.share(number)

    def release(self, held: CachedSequence) -> None:
        """Free a sequence's records."""
        for each in (held.record, held.before):
            if each is not None:
                self.free(each.number)
        held.record = held.before = None
        self._free_saved(held)

    def _free_saved(self, held: CachedSequence) -> None:
        for each in held.saved:
            self.free(each.number)
        self.spare += len(held.saved)
        held.saved = []


class KVCache:
    """The sequences of a cache, and the storage that has their keys and values. It works with plain integers.

    The rollback contract (docs/references.md, rollback): after a pass, `truncate_to` or `compact` drops rejected nodes,
    and the next pass overwrites stale slots. Copies are made in the storage at once.

    num_blocks: of each group of layers. windows: the positions that a row of each group sees, the longest first; None =
    all. With `keep_prefixes` full committed blocks stay after their sequence until the space is needed, and other
    sequences may begin with them. max_len: the most positions of a sequence. records: how many there
    are, and how many a pass may save; see `RecordPool`.
    """

    def __init__(
        self,
        storage: KVStorage,
        num_blocks: Sequence[int],
        block_size: int,
        keep_prefixes: bool = True,
        windows: Sequence[int | None] = (None,),
        max_len: int = sys.maxsize,
        records: tuple[int, int] = (0, 0),
    ) -> None:
        self.storage, self.num_blocks, self.block_size = storage, num_blocks[0], block_size
        self.num_groups, self.max_len, self._keep_prefixes = len(windows), max_len, keep_prefixes
        self.is_windowed = any(window is not None for window in windows)
        self.tree = PrefixTree(block_size)
        self.pools = [
            BlockPool(count, PrefixIndex(self.tree, window)) for count, window in zip(num_blocks, windows, strict=True)
        ]
        # One group's, whose `evicted_until` tells which prefixes are gone; with a window some blocks are not missed.
        self.whole = next((pool for pool in self.pools if pool.window is None), self.pools[0])
        self.records = RecordPool(*records, self.tree) if records[0] else None
        self.stored: StoredPrefixes | None = None  # those on disk
        self._held: dict[int, CachedSequence] = {}
        self._nothing = self._new("")  # an unknown sequence

    def reserve(self, seq_id: int, n: int) -> Slots:
        """Extend a sequence by n positions (n >= 0) and return their slots. An unknown sequence starts empty.

        Raises CapacityError, and changes nothing, when there is no room. n = 0 changes nothing.
        """
        held = self._held.get(seq_id) or self._new("")
        start, end = held.length, held.length + n
        if n == 0:
            return Slots(seq_id, start, (), ((),) * (self.num_groups - 1))
        missing, slots = list[int](), list[list[int]]()  # by loops: each comprehension would be a call
        for table in held.tables:
            missing.append(table.missing(start, n))
        if any(missing):
            self._held[seq_id] = self._grown(seq_id, held, end, missing)
        held.length = end
        for table in held.tables:
            slots.append(table.slots(start, end))
        return Slots(seq_id, start, slots[0], slots[1:])

    def advance(self, seq_id: int, start: int, certain: int) -> StateRows:
        """Return which records of a sequence a pass over the positions from `start` on reads and writes.

        certain: how many of these, from the first one on, will not be dropped again; only a pass that fails may drop
        them. Raises ValueError if more than MOST_PENDING other ones wait.
        """
        assert self.records is not None, "no layer has a state"
        return self.records.advance(self._held[seq_id], start, certain)

    def settle(self, seq_id: int) -> None:
        """Count all positions as part of the state: those of a text of copies, which is measured."""
        held = self._held.get(seq_id, self._nothing)
        held.record = held.record and Record(held.record.number, held.length)

    def table(self, seq_id: int) -> array[int]:
        """Return a sequence's block table [groups * b] of 64-bit integers, empty for an unknown one.

        A group's part lists b blocks. Those that were given back are 0. Callers must not change the table; later
        changes of the sequence make a new one.
        """
        held = self._held.get(seq_id, self._nothing)
        if held.table is None:
            held.table = array("q")
            for table in held.tables:
                held.table.extend(table.blocks)
        return held.table

    def length(self, seq_id: int) -> int:
        """Return how many positions are held; 0 for an unknown sequence."""
        held = self._held.get(seq_id)
        return held.length if held else 0

    def truncate_to(self, seq_id: int, n: int) -> None:
        """Drop every position from n on (docs/references.md, rollback).

        Raises ValueError, and changes nothing, unless the sequence holds what a row at position n sees. But if its
        state at n is lost, which `holds_window` tells, earlier positions are dropped too, up to a known state.
        """
        held = self._held.get(seq_id, self._nothing)
        if not 0 <= n <= held.length:
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {held.length} positions")
        if self.is_windowed:
            self._require_window(seq_id, n, "truncate_to")
        if n < held.length:
            if self.records is not None:
                n = self.records.truncate(held, n)
            held.length = n
            if len(held.prefix) * self.block_size > n:
                self._unlist(held, n // self.block_size)
            keep = -(-n // self.block_size)
            for table in held.tables:
                if len(table.blocks) > keep:
                    table.drop(keep)
                    held.table = None

    def holds_window(self, seq_id: int, n: int) -> bool:
        """Whether `truncate_to(seq_id, n)` keeps n positions: nothing was given back that a row at position n sees."""
        if n == 0 or not (self.is_windowed or self.records):
            return True
        held = self._held.get(seq_id, self._nothing)
        if self.records is not None and not any(
            each is not None and each.holds(n) for each in (held.record, held.before)
        ):
            return False
        tables = held.tables
        return all(table.given_back <= first_seen(table.pool.window, n) // self.block_size for table in tables)

    def drop_unseen(self, seq_id: int) -> None:
        """Give back the blocks that no later row of the sequence sees; all its positions must be committed."""
        held = self._held.get(seq_id)
        if held is None or not self.is_windowed:
            return
        for table in held.tables:
            if table.drop_unseen(held.length):
                held.table = None

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """Keep positions below `base` and, of the tree nodes from `base` on, those on `path`, the accepted path.

        Node i was written at position base + i; the path's are moved to base, base + 1, ... Parents come
        before children, so a path is increasing. Raises CapacityError, and changes nothing, where a move into
        shared positions finds no room for a copy.
        """
        held = self._held.get(seq_id, self._nothing)
        nodes = range(held.length - base)
        if not 0 <= base <= held.length or (path and list(path) != sorted(set(path).intersection(nodes))):
            raise ValueError(f"compact({base}, {list(path)}) of sequence {seq_id} with {held.length} positions")
        for n in (base, base + len(path)) if self.is_windowed else ():
            self._require_window(seq_id, n, "compact")
        if path and path[-1] >= len(path):  # else they are in place
            if self.records is not None:
                raise ValueError(f"compact({base}, {list(path)}) of sequence {seq_id}, whose state takes chains alone")
            self._move_path(seq_id, held, base, path)
        self.truncate_to(seq_id, base + len(path))

    def fork(self, src: int, dst: int) -> None:
        """Give the new sequence `dst` everything that `src` holds.

        Blocks are copied when one of the two sequences writes to them.
        """
        if dst in self._held:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        if src in self._held:
            held = self._held[src]
            copy = self._hold(dst, held.cache_salt, held.length, [table.copy() for table in held.tables], held.prefix)
            copy.record = held.record
            if self.records is not None and held.record is not None:
                self.records.share(held.record.number)

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """Give a new sequence the longest prefix of `tokens` in the prefix index; return its number of positions.

        `limit` is the most positions to take over; None = any number. The last token is never among them: it has to
        be computed to get the next one. Only sequences of the same salt share prefixes: the sequence gets the salt even
        if no prefix matches. A prefix matches as far as every group has the blocks that the next row sees.
        """
        if seq_id in self._held:
            raise ValueError(f"match_prefix for sequence {seq_id}, which is already held")
        nodes, size = self.tree.match(tokens, cache_salt), self.block_size
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        length = longest = max(0, min(len(nodes) * size, most))
        length = self.known(indexed(nodes), length)
        tables = list[BlockTable]()
        for pool in self.pools:
            gone = first_seen(pool.window, length) // size
            own = [_block_of(pool.index, node) for node in nodes[gone : -(-length // size)]]
            tables.append(BlockTable(pool, [0] * gone + own, gone).copy())
        held = self._hold(seq_id, cache_salt, length, tables, nodes[: length // size])
        if self.records is not None:
            self.records.hold(held, nodes, length)
            if self.records.spare and longest - length > 2 * size:
                held.parting = longest // size * size
        return length

    def fetch(self, tokens: Sequence[int], cache_salt: str, seconds: float) -> bool:
        """Bring what is on disk of a prefix into the prefix index; return False if there was not enough time."""
        return self.stored is None or self.stored.fetch(tokens, cache_salt, seconds)

    def mark_used(self, seq_id: int) -> None:
        """Note on disk that the prefix of a sequence was used, and keep its states; call it when the sequence ends."""
        if self.stored is not None and seq_id in self._held:
            self.stored.mark_used(self._held[seq_id].prefix)

    def slots(self, seq_id: int) -> list[list[int]]:
        """Return the slots of all positions of a sequence, for each group of layers."""
        held = self._held.get(seq_id, self._nothing)
        return [table.slots(0, held.length) for table in held.tables]

    def has_room(self, n: int) -> bool:
        """Whether a new sequence finds room for n positions."""
        return n <= self.max_len and all(-(-n // self.block_size) <= pool.num_free for pool in self.pools)

    def next_part(self, seq_id: int, end: int) -> tuple[int, int]:
        """Return a sequence's length, and how many of its next positions up to `end` a pass should compute.

        With states, a pass ends where the sequence begins to differ from known ones. Later ones find the state there.
        """
        held = self._held.get(seq_id, self._nothing)
        return held.length, (held.parting if held.length < held.parting < end else end) - held.length

    def known(self, has: Callable[[BlockPool, int], bool], length: int) -> int:
        """Return `length`, or a shorter one, so that nothing lacks that a row after that many positions needs.

        has: whether a group, or the states, have the block of a number.
        """
        while True:
            known = min(pool.known(has, length) for pool in self.pools)
            known = known if self.records is None else self.records.known(has, known)
            if known == length:
                return length
            length = known

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Add the sequence's positions of the committed `tokens`, its first ones in order, to the prefix index.

        Only full blocks are indexed. Where the index already has these tokens, the sequence switches to the indexed
        block. A sequence that holds an indexed block without a window thus holds all blocks before it, and none of them
        can be evicted.
        """
        held = self._held.get(seq_id)
        if held is None or not self._keep_prefixes:
            return
        for index in range(len(held.prefix), min(held.length, len(tokens)) // self.block_size):
            parent = held.prefix[-1] if held.prefix else self.tree.root(held.cache_salt)
            node = self.tree.child(parent, tokens, index)
            for table in held.tables:
                if index >= table.given_back:
                    block = table.pool.index.insert(node, table.blocks[index])
                    if block != table.blocks[index]:
                        table.pool.share(block)
                        table.replace(index, block)
                        held.table = None
            node.users += 1
            held.prefix.append(node)
        if held.saved and self.records is not None:
            self.records.index_saved(held)

    @property
    def _all_pools(self) -> Sequence[BlockPool]:
        return (*self.pools, *([self.records] if self.records else []))

    def forget_prefixes(self) -> bool:
        """Empty the prefix index, except for positions that sequences hold; return whether it is empty."""
        for pool in self._all_pools:
            pool.drop_kept()
        return not any(pool.index.nodes for pool in self._all_pools)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether sequences may begin with the positions of others."""
        return self._keep_prefixes

    def prefix(self, seq_id: int) -> Sequence[PrefixNode]:
        """Return the nodes of the prefix index that a sequence lists: those of its first full blocks."""
        return self._held.get(seq_id, self._nothing).prefix

    def known_blocks(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Return how many full blocks of `tokens`, from the first one on, have a node in the prefix index."""
        return len(self.tree.match(tokens, cache_salt))

    def has(self, node: PrefixNode) -> bool:
        """Whether a node is still in the prefix index, with blocks."""
        return any(pool.index.holds(node) for pool in self._all_pools)

    def forget(self, node: PrefixNode) -> bool:
        """Drop the blocks of a node, and in groups without a window all after it, unless a sequence holds one of them.

        Returns whether they were dropped.
        """
        own = [(pool, node.blocks[pool.index]) for pool in self._all_pools if pool.index.holds(node)]
        if not own or not all(pool.is_kept(block) for pool, block in own):
            return False
        for pool, block in own:
            if pool.index.holds(node):  # else it left with the block of another group
                pool.drop(block)
        return True

    def forget_state(self, node: PrefixNode) -> None:
        """Drop the record of the state at the end of a node's block, unless a sequence holds it."""
        number = None if self.records is None else self.records.index.block(node)
        if self.records is not None and number is not None and self.records.is_kept(number):
            self.records.drop(number)

    def part_at(self, seq_id: int, end: int) -> None:
        """Let the pass that ends at a position keep the state there: others will begin with it."""
        self._held[seq_id].parting = end

    def release(self, seq_id: int) -> None:
        """Free a sequence; an unknown one is ignored."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            for table in held.tables:
                table.drop(0)
            if self.records is not None:
                self.records.release(held)
            self._unlist(held, 0)

    def free_tokens(self) -> int:
        """Return how many positions new sequences can still reserve in the first group.

        Blocks that no sequence holds count as free.
        """
        return self.pools[0].num_free * self.block_size

    def check(self) -> None:
        """Assert the integrity of the bookkeeping; for tests, after every step."""
        sequences = self._held.values()
        for place, pool in enumerate(self.pools):
            tables = [held.tables[place] for held in sequences]
            pool.check(Counter(block for table in tables for block in table.blocks[table.given_back :]))
        for held in sequences:
            assert held.length <= self.max_len, "a sequence is too long"
            assert len(held.prefix) * self.block_size <= held.length, "a block was indexed before it was full"
            for table in held.tables:
                first, index = table.given_back, table.pool.index
                assert len(table.blocks) == -(-held.length // self.block_size), "blocks that the length does not need"
                indexed, own = [index.block(node) for node in held.prefix[first:]], table.blocks[first:]
                assert indexed == own[: len(indexed)], "the index has another block than the sequence"
                assert first * self.block_size <= first_seen(table.pool.window, held.length), "a block is missing"
        self.tree.check(node for held in sequences for node in held.prefix)
        if self.records is not None:
            self.records.check(Counter(each.number for held in sequences for each in held.records))
            for held in sequences:
                assert held.record is None or held.record.settled <= held.length, (
                    "a state of positions that were dropped"
                )

    def _new(self, cache_salt: str) -> CachedSequence:
        return CachedSequence(cache_salt, [BlockTable(pool) for pool in self.pools])

    def _hold(
        self, seq_id: int, cache_salt: str, length: int, tables: list[BlockTable], prefix: Sequence[PrefixNode]
    ) -> CachedSequence:
        for node in prefix:
            node.users += 1
        held = self._held[seq_id] = CachedSequence(cache_salt, tables, length, list(prefix))
        return held

    def _require_window(self, seq_id: int, n: int, call: str) -> None:
        if not self.holds_window(seq_id, n):
            raise ValueError(f"{call}({n}) of sequence {seq_id}: keys that its next row would see were given back")

    def _grown(self, seq_id: int, held: CachedSequence, end: int, missing: Sequence[int]) -> CachedSequence:
        """Add the missing blocks of each group for positions up to `end`, after a copy of the last one where needed."""
        if end > self.max_len:
            raise CapacityError(
                f"sequence {seq_id} would hold {end} positions but its cache block has {self.max_len}",
                "raise max_model_len or send a shorter prompt.",
            )
        num_blocks, shared = -(-end // self.block_size), list[Sequence[int]]()
        for table, count in zip(held.tables, missing, strict=True):
            if count > table.pool.num_free:
                raise table.pool.shortage(count, seq_id)
            copied = count > num_blocks - len(table.blocks)
            shared.append((len(table.blocks) - 1,) if copied else ())
        if any(shared):
            self._rearrange(held, held.length, (), shared)
        for table in held.tables:
            while len(table.blocks) < num_blocks:
                table.blocks.append(table.pool.allocate())
        held.table = None
        return held

    def _move_path(self, seq_id: int, held: CachedSequence, base: int, path: Sequence[int]) -> None:
        """Move the nodes of a path to positions base, base + 1, ..."""
        if not base and any(table.given_back for table in held.tables):
            raise ValueError(f"compact(0) of sequence {seq_id}, which has given back its first positions")
        shared = [table.shared(base, base + len(path)) for table in held.tables]
        for table, own in zip(held.tables, shared, strict=True):
            if len(own) > table.pool.num_free:
                raise table.pool.shortage(len(own), seq_id, "has to move shared positions and needs")
        self._rearrange(held, base, [base + node for node in path], shared)

    def _rearrange(self, held: CachedSequence, base: int, kept: Sequence[int], shared: Sequence[Sequence[int]]) -> None:
        """Move positions in every group, see `BlockTable.rearrange`; blocks that are written to leave the prefix."""
        self._unlist(held, min((own[0] for own in shared if own), default=len(held.prefix)))
        moves = [table.rearrange(base, kept, own) for table, own in zip(held.tables, shared, strict=True)]
        held.table = None
        if any(moves):
            self.storage.move(Moves(moves[0].sources, moves[0].targets, tuple(moves[1:])))

    def _unlist(self, held: CachedSequence, keep: int) -> None:
        """List only the first `keep` nodes of a sequence's prefix; others stay in the index if they have blocks."""
        while len(held.prefix) > keep:
            node = held.prefix.pop()
            node.users -= 1
            if not node.blocks:
                self.tree.prune(node)


def indexed(nodes: Sequence[PrefixNode]) -> Callable[[BlockPool, int], bool]:
    """Return whether a group has indexed the block of one of these nodes."""
    return lambda pool, index: pool.index.block(nodes[index]) is not None


def _block_of(index: PrefixIndex, node: PrefixNode) -> int:
    block = index.block(node)
    assert block is not None, "a removed block was matched"
    return block


class ReservationPlan:
    """The positions that one step will reserve, counted before anything is reserved.

    It is valid until a sequence changes; `KVCache.reserve` succeeds for everything taken. It counts the blocks that are
    left when everything taken so far has been reserved. Of several sequences that write to a block that they share, the
    last one needs no copy.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._num_free = cache, cache.pools[0].num_free
        self._held, self._unknown = cache._held, cache._nothing
        self._taken: dict[int, tuple[int, int, int]] = {}  # positions, the blocks that they need, copies among these
        self._writers = Counter[int]()  # by block: the sequences that will have written to it

    def room(self, seq_id: int) -> int:
        """Return how many more positions can be taken for a sequence."""
        cache, held = self._cache, self._held.get(seq_id, self._unknown)
        taken, blocks, copies = self._taken.get(seq_id) or (0, 0, self._copies(held))
        most = (len(held.tables[0].blocks) + self._num_free + blocks - copies) * cache.block_size
        return max(0, min(most, cache.max_len) - held.length) - taken

    def take(self, seq_id: int, n: int) -> bool:
        """Count n positions (n >= 0) for a sequence if there is room for them; return whether there is."""
        cache, held = self._cache, self._held.get(seq_id, self._unknown)
        taken, blocks, copies = self._taken.get(seq_id) or (0, 0, self._copies(held))
        end, own = held.length + taken + n, held.tables[0].blocks
        if end == held.length:
            return True
        needed = -(-end // cache.block_size) - len(own) + copies
        if needed - blocks > self._num_free or end > cache.max_len:
            return False
        if not taken and held.length % cache.block_size:
            self._writers[own[-1]] += 1
        self._num_free -= needed - blocks
        self._taken[seq_id] = taken + n, needed, copies
        return True

    def _copies(self, held: CachedSequence) -> int:
        """Return how many blocks a sequence has to copy that has taken nothing: its last one, or none."""
        if not held.length % self._cache.block_size:
            return 0
        pool, last = held.tables[0].pool, held.tables[0].blocks[-1]
        return 0 if pool.is_writable(last, self._writers[last]) else 1


class PartialCache(KVCache):
    """A view of a cache for some groups of its layers; each change applies to all groups.

    groups: the numbers of the groups that it shows, in order.
    """

    def __init__(self, cache: KVCache, groups: Sequence[int]) -> None:
        vars(self).update(vars(cache), num_groups=len(groups))
        self._whole, self._shown = cache, tuple(groups)

    @override
    def reserve(self, seq_id: int, n: int) -> Slots:
        _, start, slots, others = self._whole.reserve(seq_id, n)
        first, *shown = ((slots, *others)[group] for group in self._shown)
        return Slots(seq_id, start, first, shown)

    @override
    def table(self, seq_id: int) -> array[int]:
        table = self._whole.table(seq_id)
        size, shown = len(table) // self._whole.num_groups, array("q")
        for group in self._shown:
            shown += table[group * size : (group + 1) * size]
        return shown


def part_of(cache: KVCache, whole: CacheShape, part: CacheShape) -> KVCache:
    """Return a view of a cache for the first layers of its model; `part` is their shape. It shares all positions.

    A layer has the same window in both, and both have their groups in the order of `by_length`.
    """
    windows = [group.window for group in whole.groups]
    groups = [windows.index(group.window) for group in part.groups]
    if cache.num_groups == 1 or len(groups) == len(windows):
        return cache
    return PartialCache(cache, groups)


AGAIN_S, MOST_UNREAD = 1.0, 64  # a text that waits for room holds its source again in each step
MEASURED = -1000  # the id of a source that no request has

Key = tuple[str, tuple[int, ...]]  # salt, tokens


@dataclass(eq=False)
class Source:
    """A source in a cache: its sequence id, its tokens, and the sequences that hold it.

    states: the encoder's result [tokens, hidden], if a drafter reads it.
    """

    seq_id: int
    tokens: tuple[int, ...]
    cache_salt: str = ""
    holders: set[int] = field(default_factory=set)
    states: Tensor | None = None


class Sources:
    """The sources of the texts in one cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._by_key: dict[Key, Source] = {}
        self._held: dict[int, tuple[Key, Source]] = {}  # by the holder's sequence id
        self._next_id = MEASURED - 1
        self._unread: dict[Key, float] = {}  # until when a source is not read again from the disk

    def hold(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> Source:
        """Let a text hold its source, which it may hold already."""
        if seq_id not in self._held:
            key = cache_salt, tuple(tokens)
            if key not in self._by_key:
                source = self._by_key[key] = Source(self._next_id, key[1], cache_salt)
                self._next_id -= 1
                if self._cache.stored is not None and time.monotonic() >= self._unread.get(key, 0.0):
                    self._cache.stored.load_source(source)
                    self._unread[key] = time.monotonic() + AGAIN_S
                    if len(self._unread) > MOST_UNREAD:
                        del self._unread[next(iter(self._unread))]
            self._held[seq_id] = key, self._by_key[key]
        source = self._held[seq_id][1]
        source.holders.add(seq_id)
        return source

    def of(self, seq_id: int) -> Source | None:
        """Return the source that a text holds; None = it holds none."""
        return self._held[seq_id][1] if seq_id in self._held else None

    def is_encoded(self, source: Source) -> bool:
        """Whether the cache has the source's keys and values."""
        return self._cache.length(source.seq_id) == len(source.tokens)

    def missing(self) -> Iterator[Source]:
        """Yield the sources that are not encoded."""
        return (source for source in self._by_key.values() if not self.is_encoded(source))

    def release(self, seq_id: int) -> None:
        """Let a text release its source, if it holds one; nobody else's source is removed from the cache."""
        if seq_id not in self._held:
            return
        key, source = self._held.pop(seq_id)
        source.holders.remove(seq_id)
        if not source.holders:
            del self._by_key[key]
            self._cache.release(source.seq_id)

    def check(self) -> None:
        """Assert that each source is whole or absent in the cache, and that texts hold exactly the sources here."""
        held = {source.seq_id: source for _, source in self._held.values()}
        assert {each.seq_id for each in self._by_key.values()} == set(held), "a source without a text, or the reverse"
        for source in held.values():
            assert self._cache.length(source.seq_id) in (0, len(source.tokens)), "a source is encoded in part"
            holders = {seq_id for seq_id, (_, each) in self._held.items() if each is source}
            assert source.holders == holders, "a text holds another source"
