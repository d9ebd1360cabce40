"""The expected gain of drafting chains of a fixed length (arXiv 2211.17192, section 3).

A step drafts g tokens, and the target's pass processes g + 1 rows: the last committed token and the draft. Times are
in units of plain decoding's pass. Arrays are indexed by length: entry g belongs to drafts of g tokens, and entry 0 is
plain decoding.

An acceptance rate is the probability that a drafted token is accepted once all tokens before it in its draft are. It is
one number for all depths (the paper's alpha), or a sequence by depth, whose last entry holds for all greater depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class VerificationCurve:
    """Times of passes over `tokens` rows, in any unit: `costs[i]` belongs to `tokens[i]`, in ascending order from 1.

    Between them the cost is linear. Beyond the last it continues with the last slope, or stays constant if that is
    negative. Raises ValueError for anything else.
    """

    tokens: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.costs):
            raise ValueError(f"{len(self.tokens)} numbers of tokens have {len(self.costs)} costs; give one cost each")
        if len(self.tokens) < 2 or self.tokens[0] != 1 or any(np.diff(self.tokens) <= 0):
            raise ValueError(
                f"the numbers of tokens are {list(self.tokens)}; give two or more, in ascending order from 1"
            )
        if not all(np.isfinite(cost) and cost > 0 for cost in self.costs):
            raise ValueError(f"the costs are {list(self.costs)}; give numbers above 0")

    def relative(self, tokens: ArrayLike, batch: int = 1) -> Array:
        """Return the cost of passes with batch x tokens rows over that with `batch` rows: V(b m) / V(b)."""
        costs: Array = self._at(np.asarray(tokens, dtype=np.float64) * batch) / self._at(np.full(1, float(batch)))[0]
        return costs

    def _at(self, rows: Array) -> Array:
        slope = (self.costs[-1] - self.costs[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(rows - self.tokens[-1], 0.0)
        within: Array = np.asarray(np.interp(rows, self.tokens, self.costs))
        return within + max(slope, 0.0) * beyond


FLAT = VerificationCurve((1, 2), (1.0, 1.0))  # more rows cost nothing (arXiv 2211.17192, section 3.3)


_BISECTIONS = 50  # of the interval from 0 to 1: the result is exact to a double's precision


def survival(rates: float | Sequence[float], length: int) -> Array:
    """Return [length + 1]: entry k is the probability that the first k drafted tokens are all accepted.

    Raises ValueError as `rates_by_depth` does.
    """
    return np.concatenate([np.ones(1), np.cumprod(rates_by_depth(rates, length))])


def rates_by_depth(rates: float | Sequence[float], length: int) -> Array:
    """Return the acceptance rates of `length` drafted tokens, [length].

    Raises ValueError for a rate that is no probability, and for an empty sequence of rates.
    """
    given = np.atleast_1d(np.asarray(rates, dtype=np.float64))
    if not len(given) or not np.all((given >= 0) & (given <= 1)):
        raise ValueError(f"acceptance rates {given.tolist()} are not probabilities; give numbers from 0 to 1")
    by_depth: Array = given[np.minimum(np.arange(length), len(given) - 1)]
    return by_depth


def accepted_lengths(reached: Array) -> Array:
    """Return [length + 1]: entry k is the probability that a draft of `length` tokens has exactly k accepted.

    For one rate this is the capped geometric distribution of arXiv 2211.17192, section 3.1.
    """
    return -np.diff(reached, append=0.0)


def expected_tokens(reached: Array) -> Array:
    """Return the expected tokens per step, by length, from `survival`: the accepted ones and the one that follows.

    For one rate this is (1 - alpha^(g+1)) / (1 - alpha), equation 1 of arXiv 2211.17192, also where alpha is 1.
    """
    return np.cumsum(reached)


def step_costs(cost_ratio: float, curve: VerificationCurve, length: int, batch: int = 1) -> Array:
    """Return the time of a step by length 0 .. length: g c + V(g + 1).

    cost_ratio: c, a draft pass / a target pass. batch: sequences that step together, all with the same length. The
    target's pass then has batch x (g + 1) rows, and its time is relative to a pass of `batch` rows,
    V(b (g + 1)) / V(b). c is the ratio of passes with `batch` rows.
    """
    lengths = np.arange(length + 1)
    return lengths * cost_ratio + curve.relative(lengths + 1, batch)


def speedups(reached: Array, costs: Array) -> Array:
    """Return the speed over plain decoding by length, from `survival` and `step_costs`.

    With V = 1 this is theorem 3.8 of arXiv 2211.17192. Tokens are assumed to be accepted independently, and texts to be
    long.
    """
    return expected_tokens(reached) / costs


def operations(reached: Array, ratio: float) -> Array:
    """Return the growth factor of arithmetic operations, by length (arXiv 2211.17192, theorem 3.11).

    ratio: operations per token of the draft / of the target.
    """
    lengths = np.arange(len(reached))
    return (lengths * ratio + lengths + 1) / expected_tokens(reached)


def best_length(speeds: Array) -> int:
    """Return the length with the highest speed; the shortest one on a tie.

    All lengths are compared (arXiv 2211.17192, section 3.5, takes the integer argmax): measured costs have cliffs,
    where a kernel uses larger tiles, so a speed that falls from one length to the next may rise again.
    """
    return int(np.argmax(speeds))


def least_acceptance(costs: Array) -> float | None:
    """Return the acceptance rate alpha above which some length is faster than plain decoding, from `step_costs`.

    None = no length is faster even if everything is accepted. With V = 1 this is c, the condition alpha > c of
    corollary 3.9 in arXiv 2211.17192; one drafted token then gains (1 + alpha) / (1 + c).
    """
    if not _gains(1.0, costs):
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _gains(middle, costs) else (middle, high)
    return high


def _gains(rate: float, costs: Array) -> bool:
    reached = survival(rate, len(costs) - 1)
    return bool(np.any(speedups(reached, costs)[1:] > 1 + 1e-12))  # more than the rounding of a sum


def expected_costs(acceptance: Array, costs: Array) -> Array:
    """Return the expected cost of a known text by draft length, in the unit of `costs`.

    Given the text, a tested token was the accepted draft with probability min(1, q(x) / p(x)), independently of the
    other positions (acceptance and residual of arXiv 2211.17192, A.1, by Bayes' rule); greedy decoding makes it 0 or 1.
    So easy and hard passages count as they occur, and acceptance is not assumed to be independent.

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


def oracle_speedup(reached: Array, cost_ratio: float, curve: VerificationCurve, batch: int = 1) -> float:
    """Return the highest speed over plain decoding that knowledge of the acceptance allows: a bound for all policies.

    The oracle drafts only tokens that will be accepted (arXiv 2211.17192, section 3.5), and the target still verifies
    them. A *run* is the tokens that would be accepted from a step on, and the token after them. With `survival` s, a
    run has at least n tokens with probability s[n - 1], and none is longer than len(s). Acceptance is assumed to depend
    on the position in the text, not on the start of the draft: several steps can commit a run.

    reached: `survival` for the number of tokens that the oracle looks ahead. cost_ratio, curve and
    batch are those of `step_costs`. The result is exact for one sequence, and an upper bound for a
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
