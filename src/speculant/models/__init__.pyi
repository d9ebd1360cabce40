from .backends.base import (
    AS_STORED as AS_STORED,
    AUTO as AUTO,
    CODED as CODED,
    KIND as KIND,
    PLAIN as PLAIN,
    Backend as Backend,
    Packing as Packing,
    RoundsWeights as RoundsWeights,
    TimesWeights as TimesWeights,
    choose_backend as choose_backend,
    find_backends as find_backends,
    packing_of as packing_of,
    why_not as why_not,
)
from .backends.native import NativeBackend as NativeBackend
from .backends.reference import ReferenceBackend as ReferenceBackend
from .base import (
    Batch as Batch,
    CausalLM as CausalLM,
    Chain as Chain,
    EncodesSources as EncodesSources,
    Hidden as Hidden,
    HoldsWeights as HoldsWeights,
    ModelNeeds as ModelNeeds,
    Segment as Segment,
    SequenceInput as SequenceInput,
    build_batch as build_batch,
    check_embeddings as check_embeddings,
    check_taps as check_taps,
    check_tokens as check_tokens,
    known as known,
    relative_reads_of as relative_reads_of,
    scratch_of as scratch_of,
)
from .config import (
    MASK as MASK,
    read_attention as read_attention,
    read_decoder as read_decoder,
    read_mlp as read_mlp,
    read_norm as read_norm,
    read_windows as read_windows,
    windowed as windowed,
)
from .description import (
    MOST_WEIGHTS as MOST_WEIGHTS,
    NORMS as NORMS,
    Attention as Attention,
    Clamped as Clamped,
    DecoderConfig as DecoderConfig,
    DistanceBias as DistanceBias,
    Embedding as Embedding,
    Encoder as Encoder,
    Experts as Experts,
    Head as Head,
    Layer as Layer,
    Mlp as Mlp,
    Norm as Norm,
    Rope as Rope,
    TokenInputs as TokenInputs,
    restart_of as restart_of,
)
from .distances import buckets_of as buckets_of
from .encoding import encode_sources as encode_sources
from .entries import (
    FULL as FULL,
    POSITIVE as POSITIVE,
    count as count,
    flag as flag,
    is_whole as is_whole,
    number as number,
    show as show,
    text_config as text_config,
)
from .future_heads import (
    FeedForwardHeads as FeedForwardHeads,
    FutureHeads as FutureHeads,
    FutureShape as FutureShape,
    PlacedHeads as PlacedHeads,
    ResidualHeads as ResidualHeads,
)
from .generation import (
    NO_RULES as NO_RULES,
    OutputRules as OutputRules,
    read_end_tokens as read_end_tokens,
    read_generation as read_generation,
    read_output_rules as read_output_rules,
    read_sampling as read_sampling,
    read_start_tokens as read_start_tokens,
    sampling_entries as sampling_entries,
)
from .gguf import (
    END_KEYS as END_KEYS,
    ENDS as ENDS,
    FAMILIES as FAMILIES,
    NEUTRAL as NEUTRAL,
    read_gguf_config as read_gguf_config,
    read_gguf_decoder as read_gguf_decoder,
)
from .gguf_family import GgufFamily as GgufFamily, Number as Number, Truth as Truth
from .heads import (
    Described as Described,
    HeadConfig as HeadConfig,
    HeadDecoder as HeadDecoder,
    RoundsHeads as RoundsHeads,
    StateEntry as StateEntry,
    Truncatable as Truncatable,
    attach as attach,
    head_shapes as head_shapes,
    usual_taps as usual_taps,
)
from .linears import linears_of as linears_of
from .native.decoder import NativeDecoder as NativeDecoder
from .native.drawn import is_foreseeable as is_foreseeable
from .native.experts import PackedExperts as PackedExperts, expert_matrices as expert_matrices
from .native.head import NativeHead as NativeHead
from .native.norms import PackedNorm as PackedNorm, normalising as normalising
from .native.ops import (
    copying as copying,
    embedding as embedding,
    gating as gating,
    linear as linear,
    make_op as make_op,
)
from .native.packed import PackedDecoder as PackedDecoder, PackedMlp as PackedMlp
from .native.program import (
    TAPPED_ROWS as TAPPED_ROWS,
    EncoderProgram as EncoderProgram,
    Program as Program,
    TapMemory as TapMemory,
)
from .reference.attention import (
    Attend as Attend,
    Learned as Learned,
    context_slots as context_slots,
    distance_scores as distance_scores,
    visible_keys as visible_keys,
)
from .reference.decoder import Decoder as Decoder, spread as spread
from .reference.experts import RoutedMlp as RoutedMlp
from .reference.rotary import Rotary as Rotary
from .rope_config import longest_context as longest_context, read_rope as read_rope, rope_entries as rope_entries
from .sizes import (
    BEFORE_ATTENTION as BEFORE_ATTENTION,
    BEFORE_MLP as BEFORE_MLP,
    HEAD as HEAD,
    LAYER as LAYER,
    NORM as NORM,
    TABLE as TABLE,
    activations as activations,
    cache_shape as cache_shape,
    inner_width as inner_width,
    matrix_weights as matrix_weights,
    parameters as parameters,
    pass_matrices as pass_matrices,
    relative_reads as relative_reads,
    source_matrices as source_matrices,
    tensor_shapes as tensor_shapes,
    values_per_position as values_per_position,
)
from .source import (
    embedded_heads as embedded_heads,
    read_model_config as read_model_config,
    read_optional_config as read_optional_config,
    resolve_folder as resolve_folder,
    resolve_source as resolve_source,
    resolve_tokenizer as resolve_tokenizer,
)
from .tensor_map import (
    SAME_NAMES as SAME_NAMES,
    Columns as Columns,
    Expression as Expression,
    Plus as Plus,
    Rows as Rows,
    Shape as Shape,
    Stacked as Stacked,
    TensorMap as TensorMap,
    Transposed as Transposed,
    Unpaired as Unpaired,
    map_modules as map_modules,
    stored_name as stored_name,
    stored_shape as stored_shape,
)
from .transformers.decoders import (
    CachedDecoder as CachedDecoder,
    RecomputedDecoder as RecomputedDecoder,
    leaf_paths as leaf_paths,
)
from .transformers.network import growing_bounds as growing_bounds
from .transformers.probe import row_errors as row_errors
from .vocabulary import (
    DraftVocabulary as DraftVocabulary,
    MappedVocabulary as MappedVocabulary,
    TableRows as TableRows,
    TargetVocabulary as TargetVocabulary,
)
from .weights.cache import (
    KEPT as KEPT,
    LIMIT_BYTES as LIMIT_BYTES,
    MAPPED as MAPPED,
    PACKED as PACKED,
    WeightCache as WeightCache,
    WeightStore as WeightStore,
    cache_files as cache_files,
)
from .weights.file import (
    DamagedFileError as DamagedFileError,
    map_weights as map_weights,
    write_weights as write_weights,
)
from .weights.formats import no_weights as no_weights
from .weights.gguf import GOOD as GOOD, GgufWeights as GgufWeights
from .weights.grouped import (
    InputGroups as InputGroups,
    as_blocks as as_blocks,
    as_floats as as_floats,
    layout_for as layout_for,
    unpacked as unpacked,
    why_no_halves as why_no_halves,
)
from .weights.layouts import e4m3_numbers as e4m3_numbers
from .weights.load import (
    Checkpoint as Checkpoint,
    CheckpointFiles as CheckpointFiles,
    check_loading as check_loading,
    load_model as load_model,
    read_description as read_description,
)
from .weights.modules import ModuleFiles as ModuleFiles
from .weights.packings import (
    choose as choose,
    fastest_packing as fastest_packing,
    kept_gains as kept_gains,
    measure_gains as measure_gains,
    narrow_weights as narrow_weights,
    timed_bytes as timed_bytes,
)
from .weights.reader import WeightTypes as WeightTypes
from .weights.rounding import ROUNDED as ROUNDED, ROUNDINGS as ROUNDINGS, Rounding as Rounding
from .weights.source import (
    FLOATS as FLOATS,
    CheckedWeights as CheckedWeights,
    Mapped as Mapped,
    ModuleWeights as ModuleWeights,
    QuantizedBlocks as QuantizedBlocks,
    ShortHead as ShortHead,
    WeightSource as WeightSource,
    decode as decode,
    kind_of as kind_of,
    listed_kinds as listed_kinds,
    order_of as order_of,
    read_plain as read_plain,
    stored_bytes as stored_bytes,
)
from .weights.tensors import TensorFiles as TensorFiles
