from .constraint import (
    Grammar as Grammar,
    GrammarConstraint as GrammarConstraint,
    ReasonedConstraint as ReasonedConstraint,
    Reasoning as Reasoning,
)
from .grammars import Grammars as Grammars
from .lanes import (
    CLIENT_SHARE as CLIENT_SHARE,
    FREE_S as FREE_S,
    REFUSED_S as REFUSED_S,
    SLOW_S as SLOW_S,
    SPARE_S as SPARE_S,
    Allowance as Allowance,
    ClientLane as ClientLane,
    ClientTime as ClientTime,
    LaneClosedError as LaneClosedError,
    LaneFullError as LaneFullError,
)
from .probe import Probed as Probed, ProbeLimits as ProbeLimits, Prober as Prober
from .spec import (
    MAX_CHARACTERS as MAX_CHARACTERS,
    MAX_CHOICES as MAX_CHOICES,
    GrammarSource as GrammarSource,
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
