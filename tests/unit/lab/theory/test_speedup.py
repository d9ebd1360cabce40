"""The formulas agree with the process, drawn step by step; test_published.py has the published figures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from speculant.lab.theory.speedup import (
    FLAT,
    VerificationCurve,
    best_length,
    expected_tokens,
    least_acceptance,
    operations,
    speedups,
    step_costs,
    survival,
)
from tests.unit.lab.theory.process import STEPS, accepted_in_a_step, within_three_errors

CLIFF = VerificationCurve((1, 4, 5, 8), (1.0, 1.1, 1.6, 1.65))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rates", [[0.8], [0.9, 0.7, 0.4], [0.0], [1.0]], ids=str)
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_expected_tokens_are_those_of_the_process(rates: list[float], length: int) -> None:
    rng = np.random.default_rng(length)
    drawn = [accepted_in_a_step(rates, length, rng) + 1 for _ in range(STEPS)]
    assert within_three_errors(drawn, expected_tokens(survival(rates, length))[length])


def test_one_rate_is_equation_1() -> None:
    for alpha, length in itertools.product((0.0, 0.3, 0.99), (0, 1, 7)):
        expected = (1 - alpha ** (length + 1)) / (1 - alpha)
        assert expected_tokens(survival(alpha, length))[-1] == pytest.approx(expected, rel=1e-12)
    assert expected_tokens(survival(1.0, 7))[-1] == 8


def test_plain_decoding_is_length_0() -> None:
    assert speedups(survival(0.5, 3), step_costs(0.2, CLIFF, 3, batch=2))[0] == 1.0
    assert operations(survival(0.5, 3), 0.2)[0] == 1.0


def test_best_length_looks_beyond_a_cliff() -> None:
    """The speed falls where the pass uses larger tiles, and then rises above the earlier peak."""
    speeds = speedups(survival(0.97, 12), step_costs(0.01, CLIFF, 12))
    assert speeds[4] < speeds[3] < speeds[7]
    assert best_length(speeds) == int(np.argmax(speeds)) > 4


def test_best_length_is_0_where_nothing_gains() -> None:
    assert best_length(speedups(survival(0.1, 8), step_costs(0.3, FLAT, 8))) == 0
    assert best_length(np.ones(4)) == 0, "the shortest on a tie"


@pytest.mark.parametrize("cost_ratio", [0.02, 0.3, 0.9])
def test_least_acceptance_is_the_cost_ratio(cost_ratio: float) -> None:
    """Corollary 3.9 of arXiv 2211.17192, on both sides of the threshold."""
    costs = step_costs(cost_ratio, FLAT, 20)
    assert least_acceptance(costs) == pytest.approx(cost_ratio, abs=1e-9)
    for alpha, gains in ((cost_ratio + 0.01, True), (cost_ratio - 0.01, False)):
        speeds = speedups(survival(alpha, 20), costs)
        assert (best_length(speeds) > 0) == gains
        assert speeds[1] == pytest.approx((1 + alpha) / (1 + cost_ratio))


def test_least_acceptance_counts_the_verification() -> None:
    costs = step_costs(0.1, CLIFF, 20)
    least = least_acceptance(costs)
    assert least is not None
    assert least > 0.1
    assert speedups(survival(least + 1e-6, 20), costs).max() > 1
    assert speedups(survival(least - 1e-6, 20), costs).max() == 1.0


@pytest.mark.parametrize("cost_ratio", [1.0, 1.5])
def test_nothing_pays_with_a_draft_as_slow_as_the_target(cost_ratio: float) -> None:
    assert least_acceptance(step_costs(cost_ratio, FLAT, 20)) is None
    assert least_acceptance(step_costs(0.0, FLAT, 0)) is None, "no length to choose from"


@pytest.mark.parametrize("rates", [-0.1, 1.1, float("nan"), [0.5, 2.0], []], ids=str)
def test_rates_outside_0_to_1_are_refused(rates: float | list[float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        survival(rates, 3)
