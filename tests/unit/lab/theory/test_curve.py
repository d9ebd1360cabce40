"""A measured curve between, at and beyond its points."""

from __future__ import annotations

import pytest

from speculant.lab.theory.speedup import FLAT, VerificationCurve

CURVE = VerificationCurve((1, 3, 4), (2.0, 2.4, 3.0))


def test_curve_is_relative_to_one_row_and_linear_between() -> None:
    assert CURVE.relative([1, 2, 3, 4]) == pytest.approx([1.0, 1.1, 1.2, 1.5])


def test_curve_continues_with_the_last_slope() -> None:
    assert CURVE.relative([5, 14]) == pytest.approx([1.8, 4.5])
    falling = VerificationCurve((1, 2, 3), (1.0, 1.2, 1.1))
    assert falling.relative([3, 30]) == pytest.approx([1.1, 1.1]), "no pass becomes cheaper and cheaper"


def test_batch_is_relative_to_a_pass_of_the_batch() -> None:
    assert CURVE.relative([1, 2], batch=3) == pytest.approx([1.0, 4.2 / 2.4])
    assert FLAT.relative([1, 7], batch=5) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("tokens", "costs", "says"),
    [
        ((1, 2), (1.0,), "one cost each"),
        ((1,), (1.0,), "two or more"),
        ((2, 3), (1.0, 1.1), "from 1"),
        ((1, 3, 2), (1.0, 1.1, 1.2), "ascending"),
        ((1, 1), (1.0, 1.1), "ascending"),
        ((1, 2), (1.0, 0.0), "above 0"),
        ((1, 2), (1.0, float("nan")), "above 0"),
        ((1, 2), (float("inf"), 1.0), "above 0"),
    ],
)
def test_invalid_points_are_refused(tokens: tuple[int, ...], costs: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VerificationCurve(tokens, costs)
