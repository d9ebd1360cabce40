from .base import (
    SCALE_BYTES as SCALE_BYTES,
    CacheShape as CacheShape,
    KVStorage as KVStorage,
    LayerShape as LayerShape,
    Moves as Moves,
    Slots as Slots,
    by_length as by_length,
    first_seen as first_seen,
)
from .paged import BlockPool as BlockPool, KVCache as KVCache, ReservationPlan as ReservationPlan, part_of as part_of
from .prefixes import PrefixIndex as PrefixIndex, PrefixNode as PrefixNode, PrefixTree as PrefixTree
from .sources import MEASURED as MEASURED, Source as Source, Sources as Sources
from .storage import (
    TensorStorage as TensorStorage,
    paged_cache as paged_cache,
    read_heads as read_heads,
    round_heads as round_heads,
    slotted_cache as slotted_cache,
)
