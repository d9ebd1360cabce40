from .chance import (
    Chance as Chance,
    Chances as Chances,
    KeyedChances as KeyedChances,
    KeyedNoise as KeyedNoise,
    MostLikely as MostLikely,
    Noise as Noise,
    Purpose as Purpose,
    Stream as Stream,
    foresee as foresee,
    mix as mix,
    mix_in as mix_in,
)
from .distribution import (
    Node as Node,
    edits_of as edits_of,
    row_maxima as row_maxima,
    sampling_settings as sampling_settings,
)
from .rows import (
    GROUP as GROUP,
    copied as copied,
    most_likely as most_likely,
    rank as rank,
    take_rows as take_rows,
    top_tokens as top_tokens,
)
