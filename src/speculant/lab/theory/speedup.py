"""The expected gain of drafting chains of a fixed length (arXiv 2211.17192, section 3), and acceptance.

A step drafts g tokens, and the target's pass processes g + 1 rows: the last committed token and the draft. Times are
in units of plain decoding's pass. Arrays are indexed by length: entry g belongs to drafts of g tokens, and entry 0 is
plain decoding.

An acceptance rate is the probability that a drafted token is accepted once all tokens before it in its draft are. It is
one number for all depths (the paper's alpha), or a sequence by depth, whose last entry holds for all greater depths.

Functions of acceptance (3.2, A.2, A.5) take distributions over V tokens at the same contexts, p of the target and q of
the draft, both after all sampling settings, [..., V], and return one number per context, [...]. The paper's alpha is
the mean over contexts.

Along a text, acceptance is not independent: there are easy and hard passages. Each position of a text has a mark,
uniform from 0 to 1, and a token drafted there is accepted if the mark is below the acceptance rate. With probability R
a position repeats the mark of its predecessor; otherwise the mark is drawn anew. So every position has the same rate
alpha, R is the correlation of the acceptance of neighbours, and

    a = P(accepted | the predecessor would be) = R + (1 - R) alpha
    r = P(accepted | the predecessor would not be) = (1 - R) alpha
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


def acceptance(p: Array, q: Array, lenience: float = 1.0) -> Array:
    """Return beta, the probability that a token drawn from q is accepted: sum_x min(p(x) / l, q(x)).

    Theorem 3.5 for l = 1; A.5 for the verifier `lenient` with 0 < l < 1. Raises ValueError for another lenience.
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience={lenience} is not above 0 and up to 1; use for example 0.5")
    accepted: Array = np.minimum(p / lenience, q).sum(axis=-1).clip(max=1.0)  # it is higher by rounding alone
    return accepted


def greedy_acceptance(p: Array, q: Array, lenience: float) -> Array:
    """Return 1 where the draft's likeliest token x has p(x) >= l max(p), else 0 (A.5, temperature 0).

    p and q are those at temperature 1. The paper prints p(x) <= l max(p), which would accept the unlikely tokens.
    """
    drafted = q.argmax(axis=-1)[..., None]
    likelihood = np.take_along_axis(p, drafted, axis=-1)[..., 0]
    accepted: Array = (likelihood >= lenience * p.max(axis=-1)).astype(np.float64)
    return accepted


def divergence(p: Array, q: Array) -> Array:
    """Return D_LK = sum_x |p(x) - M(x)| with M = (p + q) / 2 (definition 3.2): half of the L1 distance of p and q.

    It is the total variation distance: symmetric, 0 for equal distributions, 1 for disjoint ones (corollary 3.4), and
    1 - D_LK is `acceptance` (lemma 3.3).
    """
    distance: Array = np.abs(p - (p + q) / 2).sum(axis=-1)
    return distance


def rejection_sampling_acceptance(p: Array, q: Array) -> Array:
    """Return the share of tokens drawn from q that rejection sampling would accept: 1 / max_x p(x) / q(x) (A.2).

    That is min_x q(x) / p(x) over the tokens that p can draw, never above `acceptance`.
    """
    possible = p > 0
    ratio = np.divide(q, p, out=np.full_like(p, np.inf), where=possible)
    least: Array = ratio.min(axis=-1)
    return least


def marks(answers: int, tokens: int, correlation: float, rng: np.random.Generator) -> Array:
    """Draw the marks of texts, [answers, tokens]. Raises ValueError for a correlation outside of [0, 1)."""
    _check(correlation)
    drawn = rng.random((answers, tokens))
    fresh = rng.random((answers, tokens)) >= correlation
    fresh[:, :1] = True
    latest = np.maximum.accumulate(np.where(fresh, np.arange(tokens), 0), axis=1)
    return np.take_along_axis(drawn, latest, axis=1)


def correlated_tokens(alpha: float, correlation: float, length: int) -> Array:
    """Return the expected tokens per step of long texts, by length 0 .. `length`, [length + 1].

    After a token that is or would be accepted, a draft has k or more accepted tokens with probability a^k; after any
    other token, with r a^(k - 1). A step ends with its first rejected token or with the target's own token, which would
    have been accepted with probability a. Let s be the share of drafts after a token that would be accepted: it is
    stationary at s = s a^(g + 1) + (1 - s) r a^g. With R = 0 the result is equation 1 of arXiv 2211.17192.
    """
    _check(correlation)
    after, fresh = correlation + (1 - correlation) * alpha, (1 - correlation) * alpha
    lengths = np.arange(length + 1)
    ends = fresh * after**lengths
    share = ends / (1 - after ** (lengths + 1) + ends)
    runs = np.concatenate([np.zeros(1), np.cumsum(after ** np.arange(length))])
    tokens: Array = 1 + (share * after + (1 - share) * fresh) * runs
    return tokens


def correlation_of(texts: Sequence[Array]) -> float:
    """Estimate R from the probabilities of acceptance along texts, each [T]; 0 where it is not defined.

    R is the covariance of neighbours' acceptance over alpha (1 - alpha), the variance of one token's acceptance. Given
    the probabilities, neighbours are accepted independently, so the probabilities have the same covariance.
    """
    mean = float(np.concatenate(texts).mean())
    products = [(text[:-1] - mean) * (text[1:] - mean) for text in texts]
    if not 0 < mean < 1 or not sum(map(len, products)):
        return 0.0
    return float(np.clip(np.concatenate(products).mean() / (mean * (1 - mean)), 0.0, 1.0))


def _check(correlation: float) -> None:
    if not 0 <= correlation < 1:
        raise ValueError(f"correlation={correlation} is not from 0 to below 1; use for example 0.3")


Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """The outcomes of N answers of `tokens` tokens each.

    steps, drafted, tested, accepted [N]: counts. cost [N]: the time of all steps, in the unit of the costs given.
    full_steps [N, length + 1]: steps with a draft of full length, by its accepted tokens; near the end of an answer
    drafts are shorter.
    """

    tokens: int
    steps: Counts
    drafted: Counts
    tested: Counts
    accepted: Counts
    cost: Array
    full_steps: Counts

    @property
    def speeds(self) -> Array:
        """The speed of each answer over plain decoding [N], if a plain step costs 1."""
        return self.tokens / self.cost


def simulate(
    rates: float | Sequence[float],
    costs: Sequence[float] | Array,
    tokens: int,
    answers: int,
    rng: np.random.Generator,
    correlation: float = 0.0,
) -> Simulation:
    """Simulate answers that are drafted by len(costs) - 1 tokens a step.

    rates: see `speedup.survival`. costs [length + 1]: of a step by its draft's length, as `step_costs` returns
    them. A draft ends one token before the answer, as the engine's do. correlation: of the acceptance of neighbours,
    0 to 1. Memory is proportional to tokens times answers. Raises ValueError for values out of range.
    """
    if tokens < 1 or answers < 1:
        raise ValueError(f"tokens={tokens} and answers={answers} must be 1 or more; use for example 128 and 1000")
    length, prices = len(costs) - 1, np.asarray(costs, dtype=np.float64)
    by_depth = np.append(rates_by_depth(rates, length), 0.0)  # the target's own token, at depth `length`, is not tested
    position_marks = marks(answers, tokens, correlation, rng)
    rows = np.arange(answers)
    counts = {name: np.zeros(answers, dtype=np.int64) for name in ("steps", "drafted", "tested", "accepted")}
    cost, full_steps = np.zeros(answers), np.zeros((answers, length + 1), dtype=np.int64)
    depth, planned = np.zeros(answers, dtype=np.int64), np.full(answers, min(length, tokens - 1))
    for position in range(tokens):
        is_draft = depth < planned
        kept = is_draft & (position_marks[:, position] < by_depth[depth])
        ends = rows[~kept]
        counts["tested"] += is_draft
        counts["accepted"] += kept
        counts["steps"][ends] += 1
        counts["drafted"][ends] += planned[ends]
        cost[ends] += prices[planned[ends]]
        full = ends[planned[ends] == length]
        full_steps[full, depth[full]] += 1
        depth = np.where(kept, depth + 1, 0)
        planned = np.where(kept, planned, min(length, max(0, tokens - position - 2)))
    return Simulation(tokens, **counts, cost=cost, full_steps=full_steps)
