"""Calls of a drafter count as attempts, whatever comes back: nothing, an error, or less than was asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from speculant.lengths import Fixed
from tests.simulation import World
from tests.unit.lengths.test_adaptive import Setting, pass_s

STEPS = 600
HANDFUL, PROBES = 10, 15  # calls in the first 16 steps, and later in STEPS steps
LEAST_OVER_PLAIN = 0.97


def speed_over_plain(
    make: Callable[[], World], setting: Setting, batch: int, steps: int = STEPS
) -> tuple[float, World]:
    """Return the policy's speed over that of plain decoding, and the world that it ran in."""
    world = make()
    return world.run(setting.adaptive(), batch, steps) / make().run(Fixed(0), batch, steps), world


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("ask_s", [0.0, 0.2], ids=["returns nothing", "fails after a while"])
@pytest.mark.parametrize("score", [None, lambda alpha: 0.9], ids=["model", "lookup"])
def test_a_drafter_that_returns_nothing_is_seldom_called(
    score: Callable[[float], float] | None, ask_s: float, batch: int
) -> None:
    """It was called in 594 of 600 steps: experiments ended by outcomes, and there were none."""
    setting = Setting(lambda place: 0.9, 0.001, score)
    speed, world = speed_over_plain(partial(setting.world, returned=lambda *_: 0, ask_s=ask_s), setting, batch)
    assert sum(step < 16 for step in world.asks) <= HANDFUL
    assert len(world.asks) <= HANDFUL + PROBES
    assert speed >= LEAST_OVER_PLAIN


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("score", [None, lambda alpha: 0.9], ids=["model", "lookup"])
def test_drafts_come_back_when_the_drafter_begins_to_return(score: Callable[[float], float] | None, batch: int) -> None:
    setting = Setting(lambda place: 0.9, 0.03, score)
    late = partial(setting.world, returned=lambda place, asked: asked if place > 300 else 0)
    speed, world = speed_over_plain(late, setting, batch, 1000)
    assert 500 <= len(world.asks) <= 700, "in nearly all of the last 660 steps"
    assert speed >= 1.9


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("most", [1, 2])
def test_a_drafter_that_returns_less_is_asked_for_less(most: int, batch: int) -> None:
    """It takes the time of all that it is asked for: asked for 16 nodes, it reached 0.8 of the best length's speed."""
    setting = Setting(lambda place: 0.9, 0.1)
    make = partial(setting.world, returned=lambda place, asked: min(asked, most))
    speed, _ = speed_over_plain(make, setting, batch)
    plain = make().run(Fixed(0), batch, STEPS)
    assert speed >= 0.95 * max(make().run(Fixed(length), batch, STEPS) for length in (1, 2)) / plain


@pytest.mark.parametrize("only", [0, 1])
def test_trials_find_the_one_sequence_that_drafts_well(only: int) -> None:
    """They looked at the newest half of the sequences alone."""
    setting = Setting(lambda place: 0.9 if place > 300 else 0.0, 0.03)
    speed, _ = speed_over_plain(partial(setting.world, only=only), setting, 2, 2000)
    assert speed >= 1.8


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_rows_that_a_constraint_forces_are_part_of_a_pass(alpha: float) -> None:
    """Passes with 6 forced rows more looked 1.2 to 1.6 times as slow as they are."""
    setting = Setting(lambda place: alpha, 0.03)
    make = partial(setting.world, forced=lambda step, index: 6 * (step % 2) * (index == 0))
    policy, world = setting.adaptive(), make()
    speed = world.run(policy, 2, STEPS) / make().run(Fixed(0), 2, STEPS)
    assert speed >= LEAST_OVER_PLAIN
    assert [policy._costs.passes.at(rows) / pass_s(rows) for rows in (1, 2, 4, 8, 16, 32)] == pytest.approx(
        [1.0] * 6, abs=0.1
    )
