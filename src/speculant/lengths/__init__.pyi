from .acceptance import MethodAcceptance as MethodAcceptance
from .adaptive import Adaptive as Adaptive
from .backlog import Backlogs as Backlogs
from .base import (
    DraftLength as DraftLength,
    DraftLengthContext as DraftLengthContext,
    DraftOutcome as DraftOutcome,
    ScoredDraft as ScoredDraft,
    num_rows as num_rows,
)
from .confidence import Confidence as Confidence, build as build, stop_below as stop_below
from .costs import (
    LEARNT as LEARNT,
    NEAR as NEAR,
    NO_ATTENTION as NO_ATTENTION,
    ROW_SHARE as ROW_SHARE,
    UNKNOWN_COSTS as UNKNOWN_COSTS,
    AttentionSeconds as AttentionSeconds,
    CostCurve as CostCurve,
    KeyCosts as KeyCosts,
    Reading as Reading,
    StepCosts as StepCosts,
)
from .explore import BUDGET as BUDGET, Experiments as Experiments
from .fixed import Fixed as Fixed
from .plan import Array as Array, Offers as Offers, choose_jointly as choose_jointly, choose_scored as choose_scored
