"""The acceptance of a drafted token from the distributions of both models (arXiv 2211.17192, 3.2, A.2, A.5).

All functions take distributions over V tokens at the same contexts, p of the target and q of the draft, both after all
sampling settings, [..., V], and return one number per context, [...]. The paper's alpha is the mean over contexts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
