"""The score tests: a correct sampler passes, a biased one fails, and the reported power is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from speculant.lab.exactness.texts import FALSE_ALARM, POWER, Score, Scores

V = 6
NO_DRAFT = torch.zeros(0, V, dtype=torch.float64)


def random_distributions(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.dirichlet(np.full(V, 0.7), size=count)


def draw(distributions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a token from each distribution [n, V]."""
    return (distributions.cumsum(-1) < rng.random((len(distributions), 1))).sum(-1).clip(max=V - 1)


def scored(p: np.ndarray, tokens: np.ndarray, q: np.ndarray | None = None) -> Scores:
    scores, given = Scores(), NO_DRAFT if q is None else torch.tensor(q)
    scores.add(torch.tensor(p), torch.tensor(tokens), given, range(len(given)))
    return scores


@pytest.mark.slow
def test_z_of_a_correct_sampler_is_standard_normal() -> None:
    rng = np.random.default_rng(1)
    z: list[list[float]] = []
    for _ in range(800):
        p = random_distributions(rng, 200)
        z.append([score.z for score in scored(p, draw(p, rng), random_distributions(rng, 200)).made])
    found = np.array(z)
    assert found.shape == (800, 3)
    assert np.abs(found.mean(0)).max() < 4 / math.sqrt(800)
    assert np.abs(found.std(0) - 1).max() < 4 / math.sqrt(2 * 800)


def test_a_correct_sampler_passes() -> None:
    rng = np.random.default_rng(2)
    p = random_distributions(rng, 20_000)
    scores = scored(p, draw(p, rng), random_distributions(rng, 20_000))
    assert scores.impossible == 0
    assert [score.name for score in scores.made] == ["favourite", "log p", "q > p"]
    assert scores.level == pytest.approx(FALSE_ALARM / 3)
    assert all(score.to_dict(scores.level)["passed"] for score in scores.made)


def test_a_sampler_that_follows_the_draft_fails() -> None:
    rng = np.random.default_rng(3)
    p, q = random_distributions(rng, 4000), random_distributions(rng, 4000)
    scores = scored(p, draw(0.8 * p + 0.2 * q, rng), q)
    found = {score.name: score for score in scores.made}
    assert found["q > p"].z > 5
    assert found["favourite"].z < -5
    assert found["log p"].z < -5
    assert not any(score.to_dict(scores.level)["passed"] for score in scores.made)


def test_a_sampler_that_is_too_cold_fails() -> None:
    rng = np.random.default_rng(4)
    p = random_distributions(rng, 4000)
    cold = p**1.3 / (p**1.3).sum(-1, keepdims=True)
    scores = scored(p, draw(cold, rng))
    assert [score.name for score in scores.made] == ["favourite", "log p"]
    assert all(score.z > 5 for score in scores.made)


@pytest.mark.slow
@pytest.mark.parametrize("level", [FALSE_ALARM / 3, 0.05])
def test_the_reported_shift_is_found_with_the_reported_power(level: int) -> None:
    rng = np.random.default_rng(5)
    runs, tokens = 500, 2000
    found = 0
    for _ in range(runs):
        p = 0.7 * random_distributions(rng, tokens) + 0.3 / V
        likeliest = np.eye(V)[p.argmax(-1)]
        score = Score("", "", "")
        score.add(torch.tensor(p), torch.tensor(likeliest), torch.tensor(draw(p, rng)))
        shift = score.detectable(level)
        assert shift is not None
        own = (p * likeliest).sum(-1, keepdims=True)
        rest = p * (1 - likeliest) * (1 - own - shift) / (1 - own)
        shifted = Score("", "", "")
        shifted.add(torch.tensor(p), torch.tensor(likeliest), torch.tensor(draw(rest + likeliest * (own + shift), rng)))
        found += shifted.p_value < level
    assert abs(found / runs - POWER) < 4 * math.sqrt(POWER * (1 - POWER) / runs)


def test_four_times_the_tokens_find_half_the_shift() -> None:
    p = np.tile([[0.5, 0.3, 0.1, 0.1, 0.0, 0.0]], (400, 1))
    tokens = np.zeros(400, dtype=np.int64)
    one, four = (scored(p[:count], tokens[:count]).favourite.detectable(0.01) for count in (100, 400))
    assert one == pytest.approx(2 * four)  # type: ignore[operator]
    assert one == pytest.approx((2.5758 + 1.6449) * 0.5 / 10, rel=1e-4)


def test_figures_are_means_over_the_tokens() -> None:
    scores = scored(np.array([[0.5, 0.25, 0.25, 0, 0, 0], [0.25, 0.75, 0, 0, 0, 0]]), np.array([0, 0]))
    value = scores.favourite.to_dict(0.01)
    assert (value["tokens"], value["expected"], value["observed"]) == (2, 0.625, 0.5)
    assert value["z"] == pytest.approx((1 - 1.25) / math.sqrt(0.25 + 0.1875))
    assert value["p_value"] == pytest.approx(math.erfc(abs(value["z"]) / math.sqrt(2)))


def test_impossible_tokens_are_counted_and_have_little_weight() -> None:
    p = np.tile([[0.5, 0.5, 0, 0, 0, 0]], (100, 1))
    scores = scored(p, np.array([0, 1] * 49 + [2, 5]))
    assert scores.impossible == 2
    assert math.isfinite(scores.logprob.observed)


def test_without_a_choice_there_is_nothing_to_find() -> None:
    p = np.eye(V)[:2]
    score = scored(p, np.array([0, 1])).favourite
    assert (score.z, score.p_value, score.detectable(0.01)) == (0, 1, None)
    assert score.to_dict(0.01)["passed"]
