"""The time of an oracle that drafts the tokens of a text that will be accepted, and no others, at measured costs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculant.lab.bench.step_costs import LengthCosts


def oracle_seconds(accepted: NDArray[np.float64], costs: LengthCosts, longest: int, batch: int = 1) -> float:
    """Return the least time to commit a text by drafts of at most `longest` tokens.

    accepted [T]: 1 where a drafted token would be accepted, else 0. batch: sequences that step together in `costs`; the
    text is charged its share of steps in which all draft as much as it does. The draft passes of a batch last as long
    as its longest draft, so no real oracle reaches that.
    """
    lengths = np.arange(longest + 1)
    steps = np.interp(lengths, costs.lengths, np.add(costs.draft_s, costs.other_s)) / batch
    least = np.zeros(len(accepted) + 1)
    for start in reversed(range(len(accepted))):
        rejected = np.flatnonzero(accepted[start:] < 1)
        most = min(int(rejected[0]) if len(rejected) else longest, longest, len(accepted) - start - 1)
        least[start] = min(steps[length] + least[start + length + 1] for length in range(most + 1))
    return float(least[0])
