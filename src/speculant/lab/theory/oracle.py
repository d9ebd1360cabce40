"""The speed of an oracle that foresees acceptance: a bound for every draft-length policy.

It drafts only tokens that will be accepted (arXiv 2211.17192, section 3.5), and the target still verifies them. A *run*
is the tokens that would be accepted from a step on, and the token after them. With `survival` s, a run has at least n
tokens with probability s[n - 1]. The oracle looks `len(s)` tokens ahead, so no run is longer.

Acceptance is assumed to depend on the position in the text, not on the start of the draft: several steps can commit a
run. Costs are in units of plain decoding's pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculant.lab.theory.curve import VerificationCurve
from speculant.lab.theory.speedup import accepted_lengths, step_costs

Array = NDArray[np.float64]


def oracle_speedup(reached: Array, cost_ratio: float, curve: VerificationCurve, batch: int = 1) -> float:
    """Return the highest speed over plain decoding that knowledge of the acceptance allows.

    reached: `lab.theory.speedup.survival` for the number of tokens that the oracle looks ahead. cost_ratio, curve and
    batch are those of `lab.theory.speedup.step_costs`. The result is exact for one sequence, and an upper bound for a
    batch.
    """
    costs = step_costs(cost_ratio, curve, len(reached) - 1, batch)
    return _alone(reached, costs) if batch == 1 else _in_a_batch(reached, cost_ratio, curve, batch)


def _alone(reached: Array, costs: Array) -> float:
    """Return the expected tokens of a run over its expected cost, with each run cut into the cheapest steps.

    The length is random, so costs are averaged over it. With V = 1 and c < 1 a run is one step, and without a limit the
    result is 1 / (1 - alpha + alpha c): 1 / (1 - alpha) tokens for a pass and alpha / (1 - alpha) c.
    """
    lengths = accepted_lengths(reached)  # [n]: the probability of a run of 1 .. n tokens
    steps = _cheapest_so_far(costs)
    cheapest = np.zeros(len(reached) + 1)
    for tokens in range(1, len(cheapest)):
        cheapest[tokens] = np.min(steps[:tokens] + cheapest[tokens - 1 :: -1])
    return float(reached.sum() / (lengths @ cheapest[1:]))


def _in_a_batch(reached: Array, cost_ratio: float, curve: VerificationCurve, batch: int) -> float:
    """Return a bound for sequences that step together, from the lower convex hull of the costs.

    Each row of a pass commits a token at best, and drafting takes as long as the longest draft, which is no shorter
    than the mean. So a step that commits m tokens per sequence costs at least c (m - 1) + V(b m) / V(b). Steps of
    different sizes cost at least the value of the convex hull at their mean, which is at most a run's mean length.
    """
    rows = np.arange(batch, batch * len(reached) + 1)
    tokens = rows / batch
    costs = cost_ratio * (tokens - 1) + _cheapest_so_far(curve.relative(tokens, batch))
    corners = _lower_hull(tokens, costs)
    most = reached.sum()
    within = np.append(tokens[corners][tokens[corners] < most], most)
    return float(np.max(within / np.interp(within, tokens[corners], costs[corners])))


def _cheapest_so_far(costs: Array) -> Array:
    """Replace each cost by the least of it and all later ones: rows can be added if a larger pass is cheaper."""
    least: Array = np.minimum.accumulate(costs[::-1])[::-1]
    return least


def _lower_hull(x: Array, y: Array) -> list[int]:
    """Return the indices of the corners of the lower convex hull of points with ascending x."""
    corners = list[int]()
    for point in range(len(x)):
        while len(corners) > 1 and _is_above(x, y, corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _is_above(x: Array, y: Array, before: int, middle: int, after: int) -> bool:
    """Whether the middle point is on or above the line between the others."""
    rise = (y[after] - y[before]) * (x[middle] - x[before])
    return bool((y[middle] - y[before]) * (x[after] - x[before]) >= rise)
