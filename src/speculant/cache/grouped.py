"""Block managers of several groups of layers, which act as one: every sequence has the same length in all of them.

    layers without a window      PagedBlockManager     [ b7 | b2 | b5 | b1 . ]
    layers with a window         PagedBlockManager     [  0 |  0 | b4 | b6 . ]      0 = given back

The first group decides how much room there is. A later group needs no more blocks than the first: if sequences share a
block of the first group, they share that of a later group or have given it back. So a later group with as many blocks
is never full before the first. It may have fewer if they suffice for all that can be in use at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from speculant.cache.base import Moves, Slots
from speculant.cache.paged import PagedBlockManager, PagedPlan, match_in_all
from speculant.cache.prefixes import PrefixTree


class GroupedBlockManager:
    """A `BlockManager` of several groups of layers.

    windows: the positions that a row sees, by group; None = all. The longest comes first. num_blocks: of each group. A
    prefix matches as far as every group has the blocks that the next row sees.
    """

    def __init__(
        self, windows: Sequence[int | None], num_blocks: Sequence[int], block_size: int, keep_prefixes: bool = True
    ) -> None:
        self._tree = PrefixTree(block_size)
        self.managers = [
            PagedBlockManager(count, block_size, keep_prefixes, window, self._tree)
            for window, count in zip(windows, num_blocks, strict=True)
        ]
        self._first, *self._others = self.managers
        self.block_size, self.num_blocks, self.num_groups = block_size, num_blocks[0], len(windows)
        self._tables: dict[int, tuple[list[array[int]], array[int]]] = {}  # the tables by group, and all in one
        self.length, self.free_tokens = self._first.length, self._first.free_tokens

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`."""
        for manager in self.managers:
            manager.require(seq_id, n)
        _, start, slots, moves, _ = self._first.reserve(seq_id, n)
        others = [manager.reserve(seq_id, n) for manager in self._others]
        moves = _together([moves, *(each.moves for each in others)])
        return Slots(seq_id, start, slots, moves, [each.slots for each in others])

    def plan(self) -> PagedPlan:
        """See `BlockManager.plan`."""
        return self._first.plan()

    def table(self, seq_id: int) -> array[int]:
        """See `BlockManager.table`."""
        parts = [manager.table(seq_id) for manager in self.managers]
        known = self._tables.get(seq_id)
        if known is None or any(part is not own for part, own in zip(parts, known[0], strict=True)):
            joined = array("q")
            for part in parts:
                joined += part
            known = parts, joined
            if joined:
                self._tables[seq_id] = known
        return known[1]

    def truncate_to(self, seq_id: int, n: int) -> None:
        """See `BlockManager.truncate_to`."""
        if 0 <= n <= self.length(seq_id) and not self.holds_window(seq_id, n):
            raise ValueError(f"truncate_to({n}) of sequence {seq_id}: keys that its next row would see were given back")
        for manager in self.managers:
            manager.truncate_to(seq_id, n)

    def holds_window(self, seq_id: int, n: int) -> bool:
        """See `BlockManager.holds_window`."""
        return all(manager.holds_window(seq_id, n) for manager in self.managers)

    def drop_unseen(self, seq_id: int) -> None:
        """See `BlockManager.drop_unseen`."""
        for manager in self.managers:
            manager.drop_unseen(seq_id)

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> Moves:
        """See `BlockManager.compact`."""
        for manager in self.managers:
            manager.check_compaction(seq_id, base, path)
        return _together([manager.compact(seq_id, base, path) for manager in self.managers])

    def fork(self, src: int, dst: int) -> Moves:
        """See `BlockManager.fork`."""
        return _together([manager.fork(src, dst) for manager in self.managers])

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """See `BlockManager.match_prefix`."""
        return match_in_all(self.managers, self._tree, seq_id, tokens, cache_salt, limit)

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `BlockManager.insert_prefix`."""
        for manager in self.managers:
            manager.insert_prefix(seq_id, tokens)

    def forget_prefixes(self) -> bool:
        """See `BlockManager.forget_prefixes`."""
        are_empty = [manager.forget_prefixes() for manager in self.managers]
        return all(are_empty)

    def release(self, seq_id: int) -> None:
        """See `BlockManager.release`."""
        self._tables.pop(seq_id, None)
        for manager in self.managers:
            manager.release(seq_id)

    def check(self) -> None:
        """See `BlockManager.check`."""
        for manager in self.managers:
            manager.check_blocks()
        self._tree.check(node for manager in self.managers for node in manager.listed())
        assert len({tuple(manager.lengths()) for manager in self.managers}) == 1, "groups hold different sequences"


def _together(moves: Sequence[Moves]) -> Moves:
    """Return moves of every group as one."""
    return Moves(moves[0].sources, moves[0].targets, tuple(moves[1:])) if any(moves) else moves[0]
