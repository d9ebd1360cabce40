"""Makes a cache of each kind: tensors for all slots, and the block manager over them.

The storage is allocated first: where it does not fit, the bookkeeping may not fit either.
"""

from __future__ import annotations

from collections.abc import Sequence

from speculant.cache.base import BlockManager, CacheShape, KVCache
from speculant.cache.grouped import GroupedBlockManager
from speculant.cache.paged import PagedBlockManager
from speculant.cache.slotted import SlottedBlockManager
from speculant.cache.storage import TensorStorage


def paged_cache(
    shape: CacheShape, num_blocks: int | Sequence[int], block_size: int, keep_prefixes: bool = True
) -> KVCache:
    """Make a cache of small blocks, see `PagedBlockManager`; raises CapacityError if the memory can't be allocated.

    num_blocks: of each group of layers, or one number for every group.
    """
    windows = [group.window for group in shape.groups]
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
    storage = TensorStorage(shape, [count * block_size for count in counts], "lower kv_memory.")
    manager: BlockManager
    if len(windows) == 1:
        manager = PagedBlockManager(counts[0], block_size, keep_prefixes, windows[0])
    else:
        manager = GroupedBlockManager(windows, counts, block_size, keep_prefixes)
    return KVCache(manager, storage)


def slotted_cache(shape: CacheShape, num_seqs: int, max_len: int) -> KVCache:
    """Make a cache of one block per sequence, see `SlottedBlockManager`; raises CapacityError too.

    It keeps all positions of every layer, even of those with a window.
    """
    storage = TensorStorage(shape, num_seqs * max_len, "lower max_num_seqs or max_model_len.")
    return KVCache(SlottedBlockManager(num_seqs, max_len), storage)
