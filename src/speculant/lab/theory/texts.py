"""The expected time of speculative decoding along a text that is known, without assuming independence.

Given the text that came out, the token at a position, if it was tested there, was the accepted draft with probability

    min(1, q(x) / p(x))

independently of the other positions: acceptance and residual of arXiv 2211.17192, A.1, by Bayes' rule. Greedy decoding
makes it 0 or 1. So easy and hard passages count as they occur, where one mean rate would mix them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculant.lab.theory.speedup import accepted_lengths

Array = NDArray[np.float64]


def expected_costs(acceptance: Array, costs: Array) -> Array:
    """Return the expected cost of a text by draft length, in the unit of `costs`.

    acceptance [T]: for each token of the text, the probability that it is accepted where it is drafted and tested.
    costs [L + 1]: the cost of a step by its length, 0 .. L. A draft ends one token before the text, as the engine's do.
    Entry 0 is plain decoding, one step per token. Raises ValueError for rates that are not probabilities.
    """
    if not np.all((acceptance >= 0) & (acceptance <= 1)):
        raise ValueError("acceptance has entries that are not probabilities; give numbers from 0 to 1")
    return np.array([_expected_cost(acceptance, costs[: length + 1]) for length in range(len(costs))])


def _expected_cost(acceptance: Array, costs: Array) -> float:
    """Return the cost for drafts of len(costs) - 1 tokens, by recursion from the end of the text."""
    count = len(acceptance)
    ahead = np.zeros(count + 1)  # the expected cost from each position on
    for start in reversed(range(count)):
        length = min(len(costs) - 1, count - start - 1)
        reached = np.concatenate([np.ones(1), np.cumprod(acceptance[start : start + length])])
        accepted = accepted_lengths(reached)
        ahead[start] = costs[length] + accepted @ ahead[start + 1 : start + length + 2]
    return float(ahead[0])
