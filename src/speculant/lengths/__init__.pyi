from .adaptive import (
    BUDGET as BUDGET,
    LONGEST_ALONE as LONGEST_ALONE,
    Adaptive as Adaptive,
    Experiments as Experiments,
    MethodAcceptance as MethodAcceptance,
    Offers as Offers,
    choose_jointly as choose_jointly,
    choose_scored as choose_scored,
)
from .base import (
    LONGEST as LONGEST,
    DraftLength as DraftLength,
    DraftLengthContext as DraftLengthContext,
    DraftOutcome as DraftOutcome,
    GuardedLength as GuardedLength,
    ScoredDraft as ScoredDraft,
    completed as completed,
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
    Backlogs as Backlogs,
    CostCurve as CostCurve,
    KeyCosts as KeyCosts,
    Reading as Reading,
    StepCosts as StepCosts,
)
from .fixed import Fixed as Fixed
from .measuring import (
    DEPTHS as DEPTHS,
    ROWS as ROWS,
    SEQUENCES as SEQUENCES,
    SLICE_S as SLICE_S,
    START_S as START_S,
    Calibration as Calibration,
    Measurement as Measurement,
    make_sequence as make_sequence,
    read_curves as read_curves,
    spread_token as spread_token,
    timed as timed,
    usual_tokens as usual_tokens,
)
