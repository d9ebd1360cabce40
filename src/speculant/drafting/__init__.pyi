from .base import (
    Build as Build,
    Drafter as Drafter,
    DrafterContext as DrafterContext,
    DrafterNeeds as DrafterNeeds,
    DrafterReads as DrafterReads,
    DraftModels as DraftModels,
    Method as Method,
    Selector as Selector,
    StatelessDrafter as StatelessDrafter,
    Target as Target,
    build_method as build_method,
    complete as complete,
    no_options as no_options,
    read_options as read_options,
)
from .composite import (
    CompositeDrafter as CompositeDrafter,
    Drafters as Drafters,
    Proposals as Proposals,
    SubDrafter as SubDrafter,
    bound as bound,
    build_sub_drafter as build_sub_drafter,
    build_sub_drafters as build_sub_drafters,
    check_draft as check_draft,
    check_extends as check_extends,
    combine as combine,
    propose_checked as propose_checked,
)
from .fallback import FallbackDrafter as FallbackDrafter
from .growth import (
    draft_beams as draft_beams,
    fit_vocabulary as fit_vocabulary,
    grow_chains as grow_chains,
    likeliest as likeliest,
)
from .heads.folder import (
    HeadFolder as HeadFolder,
    HeadParts as HeadParts,
    Part as Part,
    Role as Role,
    check_kind as check_kind,
    head_parts as head_parts,
    head_within as head_within,
    named_kind as named_kind,
)
from .heads.future import UNKNOWN as UNKNOWN, product_tree as product_tree
from .heads.hidden import HiddenDrafter as HiddenDrafter, HiddenStateRunner as HiddenStateRunner, Pending as Pending
from .heads.look_ahead import LookAheadTree as LookAheadTree
from .heads.page import QWEN_COUNT as QWEN_COUNT, describe_qwen as describe_qwen, name_in_qwen as name_in_qwen
from .heads.short import (
    FILE as FILE,
    KEY as KEY,
    output_rows as output_rows,
    read_head_tokens as read_head_tokens,
    save_head_tokens as save_head_tokens,
)
from .lookup.ngram import (
    NgramDrafter as NgramDrafter,
    NgramOptions as NgramOptions,
    Predictor as Predictor,
    context_hash as context_hash,
)
from .lookup.prediction import (
    LONGEST_MATCH as LONGEST_MATCH,
    Alignment as Alignment,
    PredictionDrafter as PredictionDrafter,
)
from .lookup.reading import (
    LONGEST_SCORED as LONGEST_SCORED,
    LookupDrafter as LookupDrafter,
    LookupOptions as LookupOptions,
    RecentMatches as RecentMatches,
    SequenceReader as SequenceReader,
    match_score as match_score,
    open_reader as open_reader,
)
from .lookup.static import StaticDrafter as StaticDrafter, build as build
from .lookup.suffix import (
    AFTER as AFTER,
    LEAST_COPY as LEAST_COPY,
    PART as PART,
    PATIENCE as PATIENCE,
    Copying as Copying,
    SuffixDrafter as SuffixDrafter,
    SuffixOptions as SuffixOptions,
    SuffixStore as SuffixStore,
)
from .lookup.synthetic import SyntheticDrafter as SyntheticDrafter, SyntheticOptions as SyntheticOptions
from .lookup.tables import FORMAT as FORMAT, BigramTables as BigramTables
from .lookup.token_recycling import (
    PRIOR as PRIOR,
    NodeAcceptance as NodeAcceptance,
    RecyclingOptions as RecyclingOptions,
    TokenRecycling as TokenRecycling,
    grow as grow,
    tree_shape as tree_shape,
)
from .merge import Merge as Merge, MergeDrafter as MergeDrafter
from .methods import (
    DEFAULT as DEFAULT,
    IN_ONE_PASS as IN_ONE_PASS,
    LOOKUPS as LOOKUPS,
    PREDICTION as PREDICTION,
    WITH_MODEL as WITH_MODEL,
    first_installed as first_installed,
    installed as installed,
    method_facts as method_facts,
    method_within as method_within,
    own_name as own_name,
    takes_model as takes_model,
)
from .model.cascade import CascadeDrafter as CascadeDrafter, InnerDrafter as InnerDrafter, copy_of as copy_of
from .model.drafter import (
    DraftModelRunner as DraftModelRunner,
    DraftSources as DraftSources,
    ModelDrafter as ModelDrafter,
    OnePassDrafter as OnePassDrafter,
    mask_of as mask_of,
)
from .model.intersection import intersect as intersect
from .model.specinfer import SpecInfer as SpecInfer
from .model.target_cache import make_target_drafter as make_target_drafter
from .topology import (
    DynamicTree as DynamicTree,
    ParallelChains as ParallelChains,
    StaticTree as StaticTree,
    TreeTopology as TreeTopology,
    read_tree as read_tree,
)
