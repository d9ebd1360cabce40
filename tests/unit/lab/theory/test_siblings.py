"""Measured rates are those of the verifiers, on distributions small enough to follow every branch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculant.drafting import Pick, StaticTree
from speculant.lab.exactness import EXACT, Branches, EnumeratingChance, enumerate_outcomes, two_distributions
from speculant.lab.theory import own_noise_rates, rejection_rates, shared_noise_rates
from speculant.sampling import KeyedNoise
from speculant.verification import choose

Array = NDArray[np.float64]
MANY = 100_000  # contexts: a mean's standard error is at most 0.0016
CLOSE = 0.007
KINDS = ("dense", "zeros", "equal supports", "tie", "one-hot")
every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("zeros", "one-hot") else pytest.mark.slow) for kind in KINDS]
)


def distributions(kind: str, seed: int = 0) -> tuple[Array, Array]:
    """Draw p and q over four tokens."""
    return two_distributions(kind, 4, np.random.default_rng(seed))


def repeated(distribution: Array) -> Array:
    return np.tile(distribution, (MANY, 1))


def siblings(distribution: Tensor, count: int, pick: Pick) -> tuple[list[int], list[Tensor]]:
    """Draw siblings like a drafter; return tokens, and the distribution from which each was drawn."""
    drawn = StaticTree.of_widths([count]).children((), [distribution], pick, distinct=False)
    return [token for token, *_ in drawn], [own for *_, own in drawn]


def rates_by_rule(p: Array, q: Array, count: int, rule: str) -> list[float]:
    """Follow every way to draw siblings and to test them."""

    def run(branches: Branches) -> int | None:
        chance = EnumeratingChance(branches)
        tokens, own = siblings(torch.tensor(q), count, chance.draw)
        if rule == "multi_draft":
            return choose(torch.tensor(p), tokens, torch.stack(own), chance)[0]
        token = chance.draw(torch.tensor(p))
        return tokens.index(token) if token in tokens else None

    found = enumerate_outcomes(run)
    return [found.get(rank, 0.0) for rank in range(count)]


@few_kinds
def test_rejection(kind: str) -> None:
    p, q = distributions(kind)
    expected = rates_by_rule(p, q, 3, "multi_draft")
    found = rejection_rates(repeated(p), repeated(q), 3, np.random.default_rng(1))
    assert found == pytest.approx(expected, abs=CLOSE)
    assert found[0] == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)


@few_kinds
def test_own_noise(kind: str) -> None:
    p, q = distributions(kind)
    found = own_noise_rates(repeated(p), repeated(q), 3, np.random.default_rng(1))
    assert found == pytest.approx(rates_by_rule(p, q, 3, "match"), abs=CLOSE)


@every_kind
def test_shared_noise(kind: str) -> None:
    """The first child is the target's own token with probability sum_v 1 / sum_u max(p_u / p_v, q_u / q_v)."""
    p, q = distributions(kind)
    found = shared_noise_rates(repeated(p), repeated(q), 4, np.random.default_rng(1))
    both = np.flatnonzero((p > 0) & (q > 0))
    expected = sum(1 / np.maximum(p / p[token], q / q[token]).sum() for token in both)
    assert found[0] == pytest.approx(expected, abs=CLOSE)
    assert found.sum() == pytest.approx(p[q > 0].sum(), abs=CLOSE), "what the draft can draw is among four children"


@pytest.mark.slow
def test_shared_noise_is_that_of_the_engine() -> None:
    p, q = (torch.tensor(distribution) for distribution in distributions("dense", seed=3))
    hits, rounds = np.zeros(3), 2000
    for position in range(rounds):
        pick = partial(draw_at, position)
        tokens, _ = siblings(q, 3, pick)
        hits += np.array(tokens) == pick(p)
    found = shared_noise_rates(repeated(p.numpy()), repeated(q.numpy()), 3, np.random.default_rng(1))
    assert found == pytest.approx(hits / rounds, abs=0.045), "four standard errors"


def draw_at(position: int, distribution: Tensor) -> int:
    return KeyedNoise(5, position).draw(distribution)


def test_contexts_are_averaged_and_ranks_end_with_the_tokens() -> None:
    (p, q), (other_p, other_q) = distributions("dense", 1), distributions("dense", 2)
    both = np.stack([p, other_p]), np.stack([q, other_q])
    first = (np.minimum(p, q).sum() + np.minimum(other_p, other_q).sum()) / 2
    for measure in (rejection_rates, shared_noise_rates, own_noise_rates):
        assert len(measure(*both, 9, np.random.default_rng(0))) == 4
    assert rejection_rates(*both, 9, np.random.default_rng(0))[0] == pytest.approx(first, abs=EXACT)
