from .constraint import (
    Grammar as Grammar,
    GrammarConstraint as GrammarConstraint,
    ReasonedConstraint as ReasonedConstraint,
    Reasoning as Reasoning,
)
from .grammars import Grammars as Grammars
from .lanes import (
    Allowance as Allowance,
    CLIENT_SHARE as CLIENT_SHARE,
    ClientLane as ClientLane,
    ClientTime as ClientTime,
    FREE_S as FREE_S,
    LaneClosedError as LaneClosedError,
    LaneFullError as LaneFullError,
    REFUSED_S as REFUSED_S,
    SLOW_S as SLOW_S,
    SPARE_S as SPARE_S,
)
from .probe import ProbeLimits as ProbeLimits, Probed as Probed, Prober as Prober
from .spec import (
    GrammarSource as GrammarSource,
    MAX_CHARACTERS as MAX_CHARACTERS,
    MAX_CHOICES as MAX_CHOICES,
    StructuredOutputs as StructuredOutputs,
    StructuredOutputsParams as StructuredOutputsParams,
    read_structured as read_structured,
    with_written_bounds as with_written_bounds,
)
from .vocabulary import (
    JoinedConstraint as JoinedConstraint,
    Vocabulary as Vocabulary,
    banned_tokens as banned_tokens,
    constrain_all as constrain_all,
)
