from .allowance import (
    CLIENT_SHARE as CLIENT_SHARE,
    FREE_S as FREE_S,
    REFUSED_S as REFUSED_S,
    SLOW_S as SLOW_S,
    SPARE_S as SPARE_S,
    Allowance as Allowance,
    ClientTime as ClientTime,
)
from .bounds import with_written_bounds as with_written_bounds
from .constraint import Grammar as Grammar, GrammarConstraint as GrammarConstraint
from .grammars import Grammars as Grammars
from .lanes import ClientLane as ClientLane
from .probe import Probed as Probed, ProbeLimits as ProbeLimits
from .prober import Prober as Prober
from .reasoned import ReasonedConstraint as ReasonedConstraint, Reasoning as Reasoning
from .spec import (
    MAX_CHARACTERS as MAX_CHARACTERS,
    MAX_CHOICES as MAX_CHOICES,
    GrammarSource as GrammarSource,
    StructuredOutputs as StructuredOutputs,
    read_structured as read_structured,
)
from .vocabulary import (
    JoinedConstraint as JoinedConstraint,
    Vocabulary as Vocabulary,
    banned_tokens as banned_tokens,
    constrain_all as constrain_all,
)
