"""Acceptance that depends on the text: after an accepted token, the next one is more likely to be accepted.

The formulas of arXiv 2211.17192 assume that tokens are accepted independently, as an approximation (sections 3.1 and
A.3). Here a text has easy and hard passages. Each of its positions has a mark, uniform from 0 to 1,
and a token drafted there is accepted if the mark is below the acceptance rate. With probability R a mark is that of the
position before; otherwise it is drawn anew. So every position has the same rate alpha, R is the correlation of the
acceptance of neighbours, and

    a = P(accepted | the one before would be) = R + (1 - R) alpha
    r = P(accepted | the one before would not be) = (1 - R) alpha
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
