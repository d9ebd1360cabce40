"""The acceptance of a drafted token from the distributions of both models (arXiv 2211.17192, 3.2, A.2, A.5).

All functions take distributions over V tokens at the same contexts, p of the target and q of the draft, both after all
sampling settings, [..., V], and return one number per context, [...]. The paper's alpha is the mean over contexts.

Along a text, acceptance is not independent: there are easy and hard passages. Each position of a text has a mark,
uniform from 0 to 1, and a token drafted there is accepted if the mark is below the acceptance rate. With probability R
a mark is that of the position before; otherwise it is drawn anew. So every position has the same rate alpha, R is the
correlation of the acceptance of neighbours, and

    a = P(accepted | the one before would be) = R + (1 - R) alpha
    r = P(accepted | the one before would not be) = (1 - R) alpha
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speculant.lab.theory.speedup import Array, rates_by_depth


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
