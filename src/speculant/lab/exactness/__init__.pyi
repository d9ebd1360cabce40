from .check import (
    Found as Found,
    Report as Report,
    ScoredTexts as ScoredTexts,
    Subject as Subject,
    Tell as Tell,
    draw_and_score as draw_and_score,
)
from .distributions import (
    EXACT as EXACT,
    FULL_SUPPORT as FULL_SUPPORT,
    MIXED as MIXED,
    NODE_KINDS as NODE_KINDS,
    Joint as Joint,
    NextProbs as NextProbs,
    Pair as Pair,
    completed as completed,
    deviation as deviation,
    joint_distribution as joint_distribution,
    softmax as softmax,
    two_distributions as two_distributions,
)
from .drafts import (
    Likeliest as Likeliest,
    TableDrafter as TableDrafter,
    choose_draft as choose_draft,
    of_method as of_method,
)
from .enumeration import (
    Branches as Branches,
    EnumeratingChance as EnumeratingChance,
    EnumeratingChances as EnumeratingChances,
    enumerate_outcomes as enumerate_outcomes,
)
from .identity import (
    ROUNDING as ROUNDING,
    WAYS as WAYS,
    TextComparison as TextComparison,
    compare as compare,
    explained as explained,
    first_gap as first_gap,
)
from .proofs import CHAINS as CHAINS, TREES as TREES, Claim as Claim, Proof as Proof, claims as claims, prove as prove
from .scores import FALSE_ALARM as FALSE_ALARM, POWER as POWER, Score as Score, Scores as Scores
from .speculation import Enumerated as Enumerated
from .tables import History as History, Table as Table, TableModel as TableModel, conditioned as conditioned
from .texts import (
    Second as Second,
    TargetReader as TargetReader,
    complete as complete,
    longest_of as longest_of,
    reread as reread,
    score_texts as score_texts,
)
