"""Makes a cache of each kind: tensors for all slots, and the block manager over them.

The storage is allocated first: where it does not fit, the bookkeeping may not fit either.
"""

from __future__ import annotations

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.paged import PagedBlockManager
from speculant.cache.slotted import SlottedBlockManager
from speculant.cache.storage import TensorStorage


def paged_cache(shape: CacheShape, num_blocks: int, block_size: int, keep_prefixes: bool = True) -> KVCache:
    """Make a cache of small blocks, see `PagedBlockManager`; raises CapacityError if the memory can't be allocated."""
    storage = TensorStorage(shape, num_blocks * block_size, "lower kv_memory.")
    return KVCache(PagedBlockManager(num_blocks, block_size, keep_prefixes), storage)


def slotted_cache(shape: CacheShape, num_seqs: int, max_len: int) -> KVCache:
    """Make a cache of one block per sequence, see `SlottedBlockManager`; raises CapacityError too."""
    storage = TensorStorage(shape, num_seqs * max_len, "lower max_num_seqs or max_model_len.")
    return KVCache(SlottedBlockManager(num_seqs, max_len), storage)
