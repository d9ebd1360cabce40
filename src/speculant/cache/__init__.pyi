from .base import (
    NO_MOVES as NO_MOVES,
    SCALE_BYTES as SCALE_BYTES,
    BlockManager as BlockManager,
    CacheShape as CacheShape,
    KVCache as KVCache,
    KVStorage as KVStorage,
    LayerShape as LayerShape,
    Moves as Moves,
    ReservationPlan as ReservationPlan,
    Slots as Slots,
    by_length as by_length,
    first_seen as first_seen,
)
from .factory import paged_cache as paged_cache, slotted_cache as slotted_cache
from .grouped import GroupedBlockManager as GroupedBlockManager
from .paged import PagedBlockManager as PagedBlockManager
from .part import part_of as part_of
from .pool import BlockPool as BlockPool
from .prefixes import PrefixIndex as PrefixIndex, PrefixNode as PrefixNode, PrefixTree as PrefixTree
from .rounding import read_heads as read_heads, round_heads as round_heads
from .slotted import SlottedBlockManager as SlottedBlockManager
from .sources import MEASURED as MEASURED, Source as Source, Sources as Sources
from .storage import TensorStorage as TensorStorage
