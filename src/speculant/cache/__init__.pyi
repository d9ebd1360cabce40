from .base import (
    MOST_PENDING as MOST_PENDING,
    NO_KEYS as NO_KEYS,
    NO_RECORD as NO_RECORD,
    SCALE_BYTES as SCALE_BYTES,
    CacheShape as CacheShape,
    KVStorage as KVStorage,
    LayerShape as LayerShape,
    Moves as Moves,
    Slots as Slots,
    StateRows as StateRows,
    StateShape as StateShape,
    by_length as by_length,
)
from .disk import BlockFiles as BlockFiles, prune as prune
from .paged import (
    MEASURED as MEASURED,
    BlockPool as BlockPool,
    KVCache as KVCache,
    PrefixIndex as PrefixIndex,
    PrefixNode as PrefixNode,
    PrefixTree as PrefixTree,
    ReservationPlan as ReservationPlan,
    Source as Source,
    Sources as Sources,
    first_seen as first_seen,
    part_of as part_of,
)
from .prepared import PART as PART, PreparedPrefixes as PreparedPrefixes
from .storage import (
    NO_RECORDS as NO_RECORDS,
    RECORDS_OF_SEQUENCE as RECORDS_OF_SEQUENCE,
    TensorStorage as TensorStorage,
    paged_cache as paged_cache,
    read_heads as read_heads,
    round_heads as round_heads,
    slotted_cache as slotted_cache,
)
from .stored import StoredPrefixes as StoredPrefixes
