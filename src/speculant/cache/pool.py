"""The blocks of one group of layers: which are free, which are held, and which are kept for later.

free ---allocate---> held (count >= 1) ---free to 0---> free, or kept if it is indexed
  ^                    ^                                   |
  |                    +---------------share---------------+
  +------------------------evict (least recently used)-----+
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from speculant.cache.prefixes import PrefixIndex


class BlockPool:
    """`num_blocks` blocks; unheld blocks in `index` are kept until the space is needed."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index, self._indexed = index, index.nodes
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        index.on_removed = self._forget

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
            self._forget(block)

    def _forget(self, block: int) -> None:
        """Free a block that left the index, unless a sequence holds it."""
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
