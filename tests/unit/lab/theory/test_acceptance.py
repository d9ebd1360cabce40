"""Acceptance from distributions agrees with draws from them, and keeps the paper's lemmas."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from speculant.lab.theory import acceptance, divergence, greedy_acceptance, rejection_sampling_acceptance
from tests.unit.lab.theory.process import within_three_errors

Array = NDArray[np.float64]

CONTEXTS, SIZE, DRAWS = 40, 6, 4000


@pytest.fixture(scope="module")
def pairs() -> tuple[Array, Array]:
    """Distributions at some contexts, a few of them sparse."""
    rng = np.random.default_rng(1)
    p, q = (rng.dirichlet(np.full(SIZE, 0.4), CONTEXTS) for _ in range(2))
    p[:5, :3] = 0.0
    return p / p.sum(axis=1, keepdims=True), q


def _drawn(pairs: tuple[Array, Array], probability: Array, seed: int) -> Array:
    """Draw tokens from q at each context and accept each with its probability [N, V]; return which were accepted."""
    rng, (_, q) = np.random.default_rng(seed), pairs
    tokens = (rng.random((CONTEXTS, DRAWS, 1)) > q.cumsum(axis=1)[:, None, :]).sum(axis=2).clip(max=SIZE - 1)
    return rng.random((CONTEXTS, DRAWS)) < np.take_along_axis(probability, tokens, axis=1)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
def test_acceptance_is_that_of_drawn_tokens(pairs: tuple[Array, Array], lenience: float) -> None:
    """Theorem 3.5 and A.5 of arXiv 2211.17192."""
    p, q = pairs
    accepted = _drawn(pairs, np.minimum(1.0, p / (lenience * q)), seed=2)
    assert within_three_errors(accepted.mean(axis=0), float(acceptance(p, q, lenience).mean()))


def test_rejection_sampling_is_that_of_drawn_tokens(pairs: tuple[Array, Array]) -> None:
    """A.2 of arXiv 2211.17192: it accepts less everywhere."""
    p, q = pairs
    found = rejection_sampling_acceptance(p, q)
    most = (p / q).max(axis=1, keepdims=True)
    assert within_three_errors(_drawn(pairs, p / (most * q), seed=3).mean(axis=0), float(found.mean()))
    assert np.all(found <= acceptance(p, q) + 1e-12)
    assert found.mean() < acceptance(p, q).mean() / 2


def test_divergence_has_the_papers_properties(pairs: tuple[Array, Array]) -> None:
    """Lemma 3.3, corollary 3.4 and corollary 3.6 of arXiv 2211.17192."""
    p, q = pairs
    assert 1 - divergence(p, q) == pytest.approx(acceptance(p, q), abs=1e-12)
    assert divergence(p, q) == pytest.approx(divergence(q, p))
    assert divergence(p, p) == pytest.approx(np.zeros(CONTEXTS))
    assert divergence(np.eye(3), np.eye(3)[[1, 2, 0]]).tolist() == [1.0, 1.0, 1.0]
    assert divergence(p, q) == pytest.approx(np.abs(p - q).sum(axis=1) / 2)


def test_lenience_only_adds(pairs: tuple[Array, Array]) -> None:
    rates = [acceptance(*pairs, lenience).mean() for lenience in (1.0, 0.5, 0.3, 0.1)]
    assert rates == sorted(rates)
    assert rates[-1] <= 1


def test_greedy_lenience_accepts_near_the_best() -> None:
    p = np.array([[0.5, 0.3, 0.2]] * 3)
    q = np.eye(3)
    assert greedy_acceptance(p, q, 1.0).tolist() == [1.0, 0.0, 0.0]
    assert greedy_acceptance(p, q, 0.6).tolist() == [1.0, 1.0, 0.0]
    assert greedy_acceptance(p, q, 0.1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.5, float("nan")])
def test_other_leniences_are_refused(lenience: float) -> None:
    with pytest.raises(ValueError, match="lenience"):
        acceptance(np.eye(2), np.eye(2), lenience)
