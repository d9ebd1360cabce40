from .base import (
    NO_TOKEN as NO_TOKEN,
    Edits as Edits,
    RowDraw as RowDraw,
    Sampler as Sampler,
    SamplingSettings as SamplingSettings,
)
from .memory import (
    ALIGNMENT as ALIGNMENT,
    LEAST_BYTES as LEAST_BYTES,
    MOST_BYTES as MOST_BYTES,
    Arena as Arena,
    Scratch as Scratch,
    aligned as aligned,
)
from .native import (
    BLOCK_SIZES as BLOCK_SIZES,
    BLOCK_TYPES as BLOCK_TYPES,
    CACHE_TYPES as CACHE_TYPES,
    FP8_BLOCK as FP8_BLOCK,
    INDEX_BYTES as INDEX_BYTES,
    MOST_DIM as MOST_DIM,
    MOST_GROUP as MOST_GROUP,
    SCALE_BYTES as SCALE_BYTES,
    TYPES as TYPES,
    Activation as Activation,
    Bounds as Bounds,
    Code as Code,
    Draft as Draft,
    Flag as Flag,
    Kernels as Kernels,
    Op as Op,
    Pass as Pass,
    Sizes as Sizes,
    Type as Type,
    Weight as Weight,
    address as address,
    library_path as library_path,
    load_library as load_library,
    open_kernels as open_kernels,
    settings_array as settings_array,
    usable_sets as usable_sets,
)
from .native_sampler import NativeEdits as NativeEdits, NativeSampler as NativeSampler
from .native_suffix_index import NativeSuffixIndex as NativeSuffixIndex, open_native as open_native
from .packing import (
    Lane as Lane,
    Packer as Packer,
    Read as Read,
    allocate as allocate,
    likely_bytes as likely_bytes,
    panel_rows as panel_rows,
)
from .reference import ACTIVATIONS as ACTIVATIONS, attend as attend, rms_norm as rms_norm, soft_cap as soft_cap
from .reference_sampler import (
    REFERENCE as REFERENCE,
    ReferenceSampler as ReferenceSampler,
    edit as edit,
    gumbel as gumbel,
)
from .suffix_index import (
    Continuation as Continuation,
    SuffixAutomaton as SuffixAutomaton,
    SuffixIndex as SuffixIndex,
    SuffixSettings as SuffixSettings,
)
from .suffix_indexes import open_suffix_index as open_suffix_index
