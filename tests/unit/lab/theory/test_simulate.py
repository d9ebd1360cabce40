"""The simulator agrees with every closed form within three standard errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from speculant.lab.theory import (
    FLAT,
    Simulation,
    VerificationCurve,
    accepted_lengths,
    correlated_tokens,
    correlation_of,
    expected_costs,
    expected_tokens,
    marks,
    operations,
    simulate,
    speedups,
    step_costs,
    survival,
)
from tests.unit.lab.theory.process import within_three_errors

ANSWERS, TOKENS = 400, 1500
CLIFF = VerificationCurve((1, 4, 5, 8), (1.0, 1.1, 1.6, 1.65))
RATES = pytest.mark.parametrize("rates", [[0.8], [0.9, 0.7, 0.4], [0.3]], ids=str)
SLOW = partial(pytest.param, marks=pytest.mark.slow)
LENGTHS = pytest.mark.parametrize("length", [0, 1, 4, 9])


def run(rates: list[float], length: int, seed: int = 0, correlation: float = 0.0, costs: object = None) -> Simulation:
    prices = np.ones(length + 1) if costs is None else np.asarray(costs)
    return simulate(rates, prices, TOKENS, ANSWERS, np.random.default_rng(seed), correlation)


def tokens_per_step(found: Simulation) -> np.ndarray:
    """Return the tokens of a full step, by answer."""
    committed = found.full_steps @ np.arange(1, found.full_steps.shape[1] + 1)
    return committed / found.full_steps.sum(axis=1)


@pytest.mark.covering(1)
@RATES
@LENGTHS
def test_tokens_per_step_are_equation_1(rates: list[float], length: int) -> None:
    expected = expected_tokens(survival(rates, length))[length]
    assert within_three_errors(tokens_per_step(run(rates, length)), expected)


@RATES
def test_accepted_lengths_are_the_capped_distribution(rates: list[float]) -> None:
    full = run(rates, 5, seed=1).full_steps
    shares = full / full.sum(axis=1, keepdims=True)
    for accepted, expected in enumerate(accepted_lengths(survival(rates, 5))):
        assert within_three_errors(shares[:, accepted], expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [1, 3])
@LENGTHS
def test_speed_is_theorem_3_8_with_a_curve(length: int, batch: int) -> None:
    """Of long texts: a step's mean cost over its mean tokens."""
    rates, costs = [0.85, 0.7], step_costs(0.15, CLIFF, length, batch)
    found = run(rates, length, seed=2)
    speeds = tokens_per_step(found) / costs[length]
    assert within_three_errors(speeds, speedups(survival(rates, length), costs)[length])


@pytest.mark.parametrize(("alpha", "length"), [SLOW(0.6, 2), (0.8, 5), SLOW(0.9, 10)])
def test_operations_are_theorem_3_11(alpha: float, length: int) -> None:
    found, ratio = run([alpha], length, seed=3), 0.1
    each = (length * ratio + length + 1) / tokens_per_step(found)
    assert within_three_errors(each, operations(survival(alpha, length), ratio)[length])


@pytest.mark.parametrize("alpha", [SLOW(0.3), 0.8, SLOW(0.95)])
def test_accepted_over_tested_is_alpha(alpha: float) -> None:
    found = run([alpha], 5, seed=4)
    assert within_three_errors(found.accepted / found.tested, alpha)
    drafted = found.accepted / found.drafted
    assert within_three_errors(drafted, (expected_tokens(survival(alpha, 5))[5] - 1) / 5, slack=1e-3)
    assert drafted.mean() < alpha - 0.02, "over drafted tokens it would be too low"


@LENGTHS
def test_cost_of_a_short_answer_is_exact(length: int) -> None:
    """Texts of 20 tokens, in which drafts shrink near the end (lab/theory/speedup.py)."""
    costs = step_costs(0.1, FLAT, length)
    found = simulate(0.7, costs, 20, 20_000, np.random.default_rng(5))
    assert within_three_errors(found.cost, expected_costs(np.full(20, 0.7), costs)[length])
    assert np.allclose(found.speeds, 20 / found.cost)


@pytest.mark.covering(1)
@pytest.mark.parametrize("correlation", [0.2, 0.6, 0.9])
@LENGTHS
def test_correlated_tokens_are_those_of_the_chain(length: int, correlation: float) -> None:
    found = run([0.7], length, seed=6, correlation=correlation)
    expected = correlated_tokens(0.7, correlation, length)[length]
    assert within_three_errors(tokens_per_step(found), expected, slack=2e-3)


def test_without_correlation_it_is_equation_1() -> None:
    for alpha in (0.0, 0.4, 0.9, 1.0):
        assert correlated_tokens(alpha, 0.0, 8) == pytest.approx(expected_tokens(survival(alpha, 8)))
    assert correlated_tokens(1.0, 0.5, 4) == pytest.approx([1, 2, 3, 4, 5])
    assert correlated_tokens(0.0, 0.5, 4) == pytest.approx(np.ones(5))


def test_correlation_costs_tokens_after_rejections() -> None:
    """Steps begin after rejections, in hard passages: with equal alpha, correlated acceptance gives fewer tokens."""
    each = [correlated_tokens(0.7, correlation, 1)[1] for correlation in (0.0, 0.3, 0.6, 0.9)]
    assert each == sorted(each, reverse=True)


@pytest.mark.parametrize("correlation", [0.0, 0.35, 0.8])
def test_correlation_is_found_again(correlation: float) -> None:
    rng = np.random.default_rng(7)
    accepted = (marks(60, 1000, correlation, rng) < 0.7).astype(float)
    assert within_three_errors(accepted.mean(axis=1), 0.7)
    each = np.array([correlation_of(list(part)) for part in np.split(accepted, 10)])
    assert within_three_errors(each, correlation, slack=0.02)


def test_correlation_of_equal_texts_is_not_defined() -> None:
    assert correlation_of([np.ones(5), np.ones(3)]) == 0.0
    assert correlation_of([np.array([0.5])]) == 0.0


def test_answers_of_one_token_take_a_pass() -> None:
    found = simulate(0.9, [1.0, 1.1, 1.2], 1, 3, np.random.default_rng(0))
    assert found.steps.tolist() == [1, 1, 1]
    assert found.cost.tolist() == [1.0] * 3
    assert found.drafted.sum() == found.tested.sum() == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"tokens": 0}, "tokens=0"), ({"answers": 0}, "answers=0"), ({"rates": 1.2}, "probabilities"),
     ({"correlation": 1.0}, "correlation"), ({"correlation": -0.1}, "correlation")],
)  # fmt: skip
def test_values_out_of_range_are_refused(change: dict[str, float], problem: str) -> None:
    given = {"rates": 0.5, "costs": [1.0, 1.1], "tokens": 5, "answers": 2, "rng": np.random.default_rng(0), **change}
    with pytest.raises(ValueError, match=problem):
        simulate(**given)
