"""Curves of costs: between their points, beyond them, and after steps that took longer."""

from __future__ import annotations

import numpy as np
import pytest

from speculant.lengths import NEAR, NO_ATTENTION, ROW_SHARE, AttentionSeconds, CostCurve, KeyCosts, StepCosts
from speculant.metrics import StepTiming


def test_curve_is_linear_between_points_and_beyond() -> None:
    curve = CostCurve({1: 1.0, 5: 2.0, 9: 4.0})
    assert [curve.at(size) for size in (1, 3, 5, 7, 9, 11)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0, 5.0])
    assert CostCurve({4: 2.0}).at(100) == 2.0


def test_curve_that_falls_is_not_continued_downwards() -> None:
    assert CostCurve({1: 2.0, 2: 1.0}).at(50) == 1.0


def test_curve_bends_with_what_sizes_read() -> None:
    """Rows that use 8 of 64 experts each: three points show the times of all sizes between them."""

    def reads(rows: int) -> float:
        return float(8 * (1 - (7 / 8) ** rows))

    seconds = {rows: 3.0 * (ROW_SHARE * rows + reads(rows)) for rows in range(1, 17)}
    some = {rows: seconds[rows] for rows in (1, 8, 16)}
    curve, straight = CostCurve(some, reads), CostCurve(some)
    assert [curve.at(rows) for rows in seconds] == pytest.approx([*seconds.values()])
    assert straight.at(3) < 0.85 * seconds[3]
    same = CostCurve(some, lambda rows: 1.0)
    assert [same.at(rows) for rows in range(30)] == pytest.approx([straight.at(rows) for rows in range(30)])


def test_curve_follows_steps() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(200):
        curve.observe(1, 3.0)
    assert curve.at(1) == pytest.approx(3.0, rel=0.05)
    assert curve.at(8) > 2.0, "the machine is slower as a whole"


def test_curve_is_not_carried_away_by_one_step() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for seconds in (1.0, 1.0, 1000.0):
        curve.observe(1, seconds)
    assert curve.at(1) < 1.2


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_curve_stays_near_the_median_of_noisy_steps(factor: float) -> None:
    """Also where every fifth step takes five times as long."""
    curve, rng = CostCurve({1: 1.0, 8: 2.0}), np.random.default_rng(0)
    seen = list[float]()
    for place, noise in enumerate(rng.lognormal(0.0, 0.2, 600)):
        curve.observe(1, factor * noise * (5 if place % 5 == 0 else 1))
        seen.append(curve.at(1))
    assert np.mean(seen[300:]) == pytest.approx(factor, rel=0.1)


def test_curve_learns_from_its_first_steps() -> None:
    """The loop that measured it may have been far from real steps."""
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(6):
        curve.observe(1, 2.0)
        curve.at(1)
    assert curve.at(1) == pytest.approx(2.0, rel=0.1)
    assert curve.at(8) > 3.0, "and so are other sizes"


def test_drafts_are_interpolated_by_sequences() -> None:
    drafts = {"some": {1: CostCurve({1: 1.0, 4: 4.0}), 8: CostCurve({1: 2.0, 4: 8.0})}}
    costs = StepCosts(CostCurve({1: 1.0}), drafts)
    asked = [(1, 4), (8, 1), (8, 4), (1, 0), (3, 1)]
    assert [costs.draft_s("some", *each) for each in asked] == pytest.approx([4.0, 2.0, 8.0, 0.0, 1 + 2 / 7])
    assert [costs.draft_s("another", *each) for each in asked] == [0.0] * 5
    table = costs.drafts_s("some", 12, 5)[:13, :6]
    each = [[costs.draft_s("some", sequences, depth) for depth in range(6)] for sequences in range(1, 13)]
    assert table[1:].tolist() == [pytest.approx(row) for row in each]
    assert not table[0].any()


def test_attention_adds_time_to_passes_after_long_texts() -> None:
    """Two sequences of 100 and 300 keys: 2 s for each key's first row in 100 passes, 1 s for each row more."""
    costs = StepCosts(CostCurve({1: 2.0, 9: 10.0}), keys=KeyCosts(0.01, 0.005))
    attention = costs.attention([1, 3], [100, 300])
    assert attention.plain_s == pytest.approx(2.0 * (100 * 0.01 + 300 * (0.01 + 2 * 0.005)))
    assert attention.node_s == pytest.approx(2.0 * 200 * 0.005)
    plain_s = costs.passes.at(4) + attention.plain_s
    expected = [plain_s, 6 + attention.plain_s + attention.node_s, 7 + attention.plain_s + 2 * attention.node_s]
    assert costs.steps_s(4, 2, 2, attention) == pytest.approx(expected)
    first_alone = StepCosts(costs.passes, keys=KeyCosts(0.01)).attention([1], [100])
    assert costs.steps_s(1, 1, 1, first_alone) == pytest.approx([4.0, 5.0]), "each pass reads the keys"
    assert costs.steps_s(4, 2, 2) == pytest.approx([5.0, 6.0, 7.0]), "no attention unless it is given"


def timing(pass_s: float, rest_s: float = 0.0) -> StepTiming:
    return StepTiming(0.0, 0.0, pass_s, rest_s)


def test_long_texts_change_curves_in_proportion() -> None:
    costs = StepCosts(CostCurve({1: 2.0, 9: 10.0}), keys=KeyCosts(0.01, 0.005))
    attention = AttentionSeconds(2.0)
    for step in range(200):
        costs.observe_step(step, 1, 1, timing(4.0), 2.0)
        costs.observe_plain(step, 1, 1, timing(3.0), attention)
    assert costs.passes.at(1) == pytest.approx(2.0, rel=0.02)
    assert costs.steps_s(1, 1, 0, attention)[0] == pytest.approx(3.0, rel=0.02)
    for step in range(400):
        costs.observe_step(step, 1, 1, timing(6.0), costs.passes.at(1))
    assert costs.passes.at(1) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_passes_with_and_without_drafts_differ_as_seen(share: float) -> None:
    costs = StepCosts(CostCurve({1: 1.0, 8: 1.5}))
    for step in range(200):
        costs.observe_step(step, 1, 1, timing(2.0), 0.0)
        costs.observe_plain(step, 1, 1, timing(2.0 * share), NO_ATTENTION)
    assert costs.passes.at(1) == pytest.approx(2.0, rel=0.05)
    assert costs.steps_s(1, 1, 0)[0] == pytest.approx(2.0 * share, rel=0.05)


def test_a_change_that_one_kind_shows_holds_for_both() -> None:
    """Passes of one kind alone show the machine; those of long ago are compared with none."""
    costs = StepCosts(CostCurve({1: 1.0, 8: 1.5}))
    for step in range(100):
        costs.observe_step(step, 1, 1, timing(2.0), 0.0)
    assert costs.steps_s(1, 1, 0)[0] == pytest.approx(2.0, rel=0.05)
    for step in range(100 + NEAR, 400):
        costs.observe_plain(step, 1, 1, timing(4.0), NO_ATTENTION)
    assert costs.steps_s(1, 1, 0)[0] == pytest.approx(4.0, rel=0.05)
    assert costs.passes.at(1) == pytest.approx(4.0, rel=0.05)


def test_a_step_s_time_beside_passes_depends_on_drafts() -> None:
    """A step with drafts has more to commit; it never takes less than one without."""
    costs = StepCosts(CostCurve({1: 2.0, 9: 10.0}))
    for step in range(50):
        costs.observe_step(step, 1, 2, timing(2.0, 1.0), 0.0)
        costs.observe_plain(step, 1, 2, timing(2.0, 0.5), NO_ATTENTION)
    assert costs.steps_s(1, 1, 2) == pytest.approx([2.25, 3.5, 4.5], rel=1e-3)
    assert costs.steps_s(1, 2, 2) == pytest.approx([2.5, 4.0, 5.0], rel=1e-3)
    for step in range(120):
        costs.observe_plain(step, 1, 2, timing(2.0, 2.0), NO_ATTENTION)
    assert costs.steps_s(1, 1, 1) == pytest.approx([3.0, 4.0], rel=0.01)
