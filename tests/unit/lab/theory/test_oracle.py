"""The oracle is as fast as the best policy that foresees acceptance, and no fixed length is faster."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from speculant.lab.theory.speedup import FLAT, VerificationCurve, oracle_speedup, speedups, step_costs, survival
from tests.unit.lab.theory.process import simulated_knowing_speed, within_three_errors

AHEAD = 200
CLIFF = VerificationCurve((1, 4, 5, 8), (1.0, 1.05, 1.9, 1.95))
SLOPE = VerificationCurve((1, 2), (1.0, 1.06))
UNEVEN = VerificationCurve((1, 2, 3, 4), (1.0, 1.4, 1.1, 1.2))


@pytest.mark.parametrize(("alpha", "cost_ratio"), [(0.5, 0.0), (0.8, 0.1), (0.9, 0.05), (0.0, 0.3)])
def test_without_verification_cost_it_equals_the_paper(alpha: float, cost_ratio: float) -> None:
    """1 / (1 - alpha) tokens for a pass of the target and alpha / (1 - alpha) of the draft (arXiv 2211.17192, 3.5)."""
    expected = 1 / (1 - alpha + alpha * cost_ratio)
    for batch in (1, 4):
        found = oracle_speedup(survival(alpha, AHEAD), cost_ratio, FLAT, batch)
        assert found == pytest.approx(expected, rel=1e-6)


def test_it_equals_a_simulated_drafter_that_foresees() -> None:
    """With a linear cost, it is best to draft all tokens that will be accepted."""
    costs = step_costs(0.1, SLOPE, AHEAD)
    simulated = simulated_knowing_speed(0.8, lambda length: float(costs[length]), lambda run: run - 1)
    assert within_three_errors(simulated, oracle_speedup(survival(0.8, AHEAD), 0.1, SLOPE), slack=5e-3)


def test_it_cuts_runs_at_a_cliff() -> None:
    """Five tokens in one pass cost more than four and then one, so stopping at four is faster."""
    costs = step_costs(0.01, CLIFF, 4).tolist() + [100.0] * AHEAD
    steep = VerificationCurve((1, 4, 5), (1.0, 1.05, 100.0))
    greedy = simulated_knowing_speed(0.7, costs.__getitem__, lambda run: min(run, 4) - 1)
    assert within_three_errors(greedy, oracle_speedup(survival(0.7, AHEAD), 0.01, steep), slack=5e-3)


@pytest.mark.parametrize("cost_ratio", [1.0, 2.0])
def test_it_drafts_no_tokens_that_do_not_pay(cost_ratio: float) -> None:
    assert oracle_speedup(survival(0.9, AHEAD), cost_ratio, FLAT) == pytest.approx(1.0)
    assert oracle_speedup(survival(0.9, AHEAD), cost_ratio, FLAT, batch=3) == pytest.approx(1.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("curve", [FLAT, CLIFF, SLOPE, UNEVEN], ids=["flat", "cliff", "slope", "uneven"])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_no_fixed_length_is_faster(curve: VerificationCurve, batch: int) -> None:
    for alpha, cost_ratio in itertools.product((0.2, 0.6, 0.95, 1.0), (0.0, 0.05, 0.4)):
        reached = survival(alpha, AHEAD)
        bound = oracle_speedup(reached, cost_ratio, curve, batch)
        assert bound >= speedups(reached, step_costs(cost_ratio, curve, AHEAD, batch)).max() - 1e-9


def test_bound_for_a_batch_is_above_the_exact_one() -> None:
    """The convex hull of the costs holds for one sequence too; the exact value is no higher."""
    stretched = VerificationCurve((1, 2, 8, 10, 16), (1.0, 1.0, 1.05, 1.9, 1.95))  # CLIFF for batches of two
    for alpha in (0.5, 0.8, 0.95):
        reached = survival(alpha, AHEAD)
        assert oracle_speedup(reached, 0.05, stretched, 2) >= oracle_speedup(reached, 0.05, CLIFF) - 1e-9


def test_a_shorter_view_gains_less() -> None:
    assert oracle_speedup(survival(1.0, 7), 0.1, FLAT) == pytest.approx(8 / 1.7)
    speeds = [oracle_speedup(survival(0.9, ahead), 0.1, FLAT) for ahead in (0, 1, 5, 50)]
    assert speeds[0] == 1.0
    assert np.all(np.diff(speeds) > 0)
