"""A view of a KV cache for the first layers of its model: the groups that these layers belong to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from speculant.cache.base import BlockManager, CacheShape, KVCache, Slots


class PartialBlockManager:
    """A `BlockManager` that shows some groups of another manager; each change applies to all groups of that manager.

    groups: the numbers of the groups that it shows, in order.
    """

    def __init__(self, manager: BlockManager, groups: Sequence[int]) -> None:
        self._manager, self._groups = manager, tuple(groups)
        self.num_blocks, self.block_size, self.num_groups = manager.num_blocks, manager.block_size, len(groups)
        self.plan, self.length, self.check, self.release = manager.plan, manager.length, manager.check, manager.release
        self.truncate_to, self.holds_window = manager.truncate_to, manager.holds_window
        self.drop_unseen, self.free_tokens, self.compact = manager.drop_unseen, manager.free_tokens, manager.compact
        self.fork, self.match_prefix = manager.fork, manager.match_prefix
        self.insert_prefix, self.forget_prefixes = manager.insert_prefix, manager.forget_prefixes

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`; the moves are those of all groups."""
        _, start, slots, moves, others = self._manager.reserve(seq_id, n)
        every = (slots, *others) if n else ((),) * self._manager.num_groups
        first, *shown = (every[group] for group in self._groups)
        return Slots(seq_id, start, first, moves, shown)

    def table(self, seq_id: int) -> array[int]:
        """See `BlockManager.table`."""
        table = self._manager.table(seq_id)
        size, shown = len(table) // self._manager.num_groups, array("q")
        for group in self._groups:
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
    return KVCache(PartialBlockManager(cache.manager, groups), cache.storage)
