"""The time along a known text is that of the engine's process, also with correlated acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from speculant.lab.exactness.tables import two_distributions
from speculant.lab.theory.speedup import FLAT, expected_costs, speedups, step_costs, survival
from tests.unit.lab.theory.process import accepted_in_a_step, within_three_errors

COSTS = step_costs(0.2, FLAT, 4)
ROUNDS = 4000


def simulated_cost(acceptance: list[float], length: int, rng: np.random.Generator) -> float:
    position, cost = 0, 0.0
    while position < len(acceptance):
        drafted = min(length, len(acceptance) - position - 1)
        cost += COSTS[drafted]
        position += accepted_in_a_step([*acceptance[position:], 0.0], drafted, rng) + 1
    return cost


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_cost_is_that_of_the_process(length: int) -> None:
    acceptance = [1.0, 1.0, 0.9, 0.1, 0.0, 0.5, 1.0, 1.0, 1.0, 0.3, 0.8]
    rng = np.random.default_rng(length)
    drawn = [simulated_cost(acceptance, length, rng) for _ in range(ROUNDS)]
    found = expected_costs(np.array(acceptance), COSTS)[length]
    assert within_three_errors(drawn, found)


@pytest.mark.slow
def test_long_text_of_one_rate_has_the_formulas_speed() -> None:
    text = np.full(4000, 0.7)
    speeds = len(text) / expected_costs(text, COSTS)
    assert speeds == pytest.approx(speedups(survival(0.7, 4), COSTS), rel=2e-3)


def test_runs_count_as_they_occur() -> None:
    """One half of the text is easy and one is hard; a mean rate of 0.5 would predict fewer steps."""
    runs, mixed = np.array([1.0] * 100 + [0.0] * 100), np.full(200, 0.5)
    assert expected_costs(runs, COSTS)[4] == pytest.approx((20 + 96) * COSTS[4] + COSTS[:4].sum())
    assert expected_costs(mixed, COSTS)[4] < 0.9 * expected_costs(runs, COSTS)[4]


def test_greedy_text_is_counted() -> None:
    assert expected_costs(np.array([1.0, 1.0, 0.0, 1.0]), COSTS[:3]) == pytest.approx([4.0, 1.2 + 1.2 + 1.0, 1.4 + 1.0])
    assert expected_costs(np.array([]), COSTS[:2]) == pytest.approx([0.0, 0.0])


def test_acceptance_given_the_token_is_the_ratio() -> None:
    """Given that x came out of `rejection`, it was the accepted draft with probability min(1, q(x) / p(x))."""
    p, q = two_distributions("dense", 4, np.random.default_rng(3))
    accepted = np.minimum(p, q)
    residual = (1 - accepted.sum()) * (p - accepted) / (p - accepted).sum()
    assert accepted / (accepted + residual) == pytest.approx(np.minimum(1, q / p))


@pytest.mark.parametrize("entry", [-0.1, 1.5, float("nan")])
def test_entries_outside_0_to_1_are_refused(entry: float) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        expected_costs(np.array([0.5, entry]), COSTS)
