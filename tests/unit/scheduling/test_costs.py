"""Curves of costs: between their points, beyond them, and after steps that took longer."""

from __future__ import annotations

import pytest

from speculant.scheduling.costs import CostCurve, StepCosts


def test_curve_is_linear_between_points_and_beyond() -> None:
    curve = CostCurve({1: 1.0, 5: 2.0, 9: 4.0})
    assert [curve.at(size) for size in (1, 3, 5, 7, 9, 11)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0, 5.0])
    assert CostCurve({4: 2.0}).at(100) == 2.0


def test_curve_that_falls_is_not_continued_downwards() -> None:
    assert CostCurve({1: 2.0, 2: 1.0}).at(50) == 1.0


def test_curve_follows_steps() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(200):
        curve.observe(1, 3.0)
    assert curve.at(1) == pytest.approx(3.0, rel=0.05)
    assert curve.at(8) > 2.0, "the machine is slower as a whole"


def test_curve_is_not_carried_away_by_one_step() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    curve.observe(1, 1000.0)
    assert curve.at(1) < 1.5


def test_curve_believes_a_step_that_is_far_too_fast() -> None:
    curve = CostCurve({1: 1.0, 3: 8.0, 8: 8.0, 16: 9.0})
    curve.observe(8, 1.2)
    assert curve.at(8) < 1.8
    assert curve.at(3) <= curve.at(8), "fewer rows do not take longer"
    assert curve.at(16) > 7


def test_drafts_are_interpolated_by_sequences() -> None:
    drafts = {"some": {1: CostCurve({1: 1.0, 4: 4.0}), 8: CostCurve({1: 2.0, 4: 8.0})}}
    costs = StepCosts(CostCurve({1: 1.0}), drafts)
    asked = [(1, 4), (8, 1), (8, 4), (1, 0), (3, 1)]
    assert [costs.draft_s("some", *each) for each in asked] == pytest.approx([4.0, 2.0, 8.0, 0.0, 1 + 2 / 7])
    assert [costs.draft_s("another", *each) for each in asked] == [0.0] * 5
