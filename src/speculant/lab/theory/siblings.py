"""The rates at which a verifier accepts the child of each rank; `lab/theory/trees.py` builds trees from them.

All functions take distributions at the same contexts, p of the target and q of the draft, each [N, V], and return the
rates of up to `count` ranks (there are at most V) as `lab/theory/trees.py` defines them, averaged over the contexts.
Children are drawn from q without replacement. Rates that depend on earlier draws are estimated with the generator, one
draw per context; repeat a context to draw it several times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rejection_rates(p: Array, q: Array, count: int, rng: np.random.Generator) -> Array:
    """Return multi-draft rejection's rates (arXiv 2305.09781, 2402.12374): rank r is accepted with min(1, r(x) / q(x)).

    Acceptance is never drawn: at each rank its probability is a sum over the vocabulary, sum_v min(r, q), and the
    token that the next rank excludes is drawn as a rejected one, from norm((q - r)+). Rank 0 is exact.
    """
    rest, token_probs, reached = p, q, np.ones(len(p))
    rates = np.zeros(min(count, p.shape[1]))
    for rank in range(len(rates)):
        shared = np.minimum(rest, token_probs).sum(axis=1)
        rates[rank] = (reached * shared).mean()
        reached = reached * np.clip(1 - shared, 0, 1)
        token = _draw(np.clip(token_probs - rest, 0, None), rng)
        rest = _normalised(np.clip(rest - token_probs, 0, None))
        token_probs = token_probs.copy()
        token_probs[np.arange(len(token_probs)), token] = 0.0
        token_probs = _normalised(token_probs)
    return rates


def shared_noise_rates(p: Array, q: Array, count: int, rng: np.random.Generator) -> Array:
    """Return the rates of `match` where draft and target draw with the same noise G: argmax(log p + G)."""
    noise = rng.gumbel(size=p.shape)
    wanted = (_log(p) + noise).argmax(axis=1)[:, None]
    tokens, drawn = _children(q, noise, count)
    rates: Array = ((tokens == wanted) & drawn).mean(axis=0)
    return rates


def own_noise_rates(p: Array, q: Array, count: int, rng: np.random.Generator) -> Array:
    """Return the rates of `match` where the target has noise of its own: rank r is accepted with p of its token."""
    tokens, drawn = _children(q, rng.gumbel(size=q.shape), count)
    rates: Array = (np.take_along_axis(p, tokens, axis=1) * drawn).mean(axis=0)
    return rates


def _children(q: Array, noise: Array, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw without replacement: the best of log q + noise, [N, count], and which of them q allows."""
    scores = _log(q) + noise
    tokens = np.argsort(-scores, axis=1)[:, :count]
    return tokens, np.isfinite(np.take_along_axis(scores, tokens, axis=1))


def _draw(weights: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw an index per row of weights [N, V]; an arbitrary one for a row of zeros."""
    reached = weights.cumsum(axis=1)
    points = rng.random((len(weights), 1)) * reached[:, -1:]
    indices: NDArray[np.int64] = (reached <= points).sum(axis=1)
    return indices.clip(max=weights.shape[1] - 1)


def _normalised(weights: Array) -> Array:
    """Divide rows by their sums; a row of zeros stays as it is."""
    totals = weights.sum(axis=1, keepdims=True)
    return weights / np.where(totals > 0, totals, 1.0)


def _log(token_probs: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(token_probs)
