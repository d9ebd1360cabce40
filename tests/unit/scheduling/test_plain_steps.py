"""Steps without drafts are timed once those before them have stopped becoming faster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculant.lengths.choice import Choice
from speculant.lengths.costs import CostCurve, StepCosts
from speculant.lengths.plain_steps import FIRST_WAIT, PlainSteps
from speculant.metrics import StepTiming


def world() -> tuple[PlainSteps, StepCosts]:
    """Return plain steps and costs whose passes take a second."""
    costs = StepCosts(CostCurve({1: 1.0}))
    return PlainSteps(costs), costs


def choice(left: int = 0) -> Choice:
    return Choice([], [0], 1, 1.0, True, left)


def feed(plain: PlainSteps, passes: Sequence[float]) -> Choice:
    """Let steps without drafts take so long; return the choice that they belong to."""
    held = choice()
    for seconds in passes:
        plain.observe(held, StepTiming(0.0, 0.0, seconds, seconds))
    return held


def test_a_trial_begins_when_passes_look_slower() -> None:
    plain, costs = world()
    costs.passes = CostCurve({1: 1.2})
    assert not plain.due(), "nothing was drafted"
    plain, costs = world()
    due = []
    plain.drafted()
    for seconds in (1.0, 1.1, 1.2, 1.3):
        costs.passes = CostCurve({1: seconds})
        due.append(plain.due())
    assert due == [False, False, True, False], "the last is known by then"


def test_a_trial_begins_after_steps_with_drafts_each_time_more() -> None:
    plain, _ = world()
    for wait in (FIRST_WAIT, 2 * FIRST_WAIT):
        drafted = [plain.drafted() for _ in range(wait - 1)]
        assert not plain.due()
        assert plain.drafted() == drafted[-1] + 1 == wait
        assert plain.due()


def test_a_trial_continues_while_steps_become_faster() -> None:
    """Weights that drafts displaced from the caches come back over some steps, which do not count."""
    plain, costs = world()
    plain.drafted()
    plain._drafted = FIRST_WAIT
    assert plain.due()
    for seconds in (0.9, 0.8, 0.7):
        assert feed(plain, [seconds] * 4).left == 4, "another block follows"
        assert plain.running
        assert costs.undrafted == 1.0
    assert feed(plain, [0.7, 0.69, 0.7, 3.0]).left == 0
    assert not plain.running
    assert costs.undrafted == pytest.approx(0.7, rel=0.15)


def test_a_trial_has_an_end() -> None:
    plain, _ = world()
    plain._drafted = FIRST_WAIT
    assert plain.due()
    feed(plain, [0.9**block for block in range(8) for _ in range(4)])
    assert not plain.running


@pytest.mark.parametrize(("steps", "known"), [(3, False), (7, True)])
def test_an_interrupted_trial_keeps_its_times(steps: int, known: bool) -> None:
    plain, costs = world()
    plain._drafted = FIRST_WAIT
    assert plain.due()
    plain.end(feed(plain, [0.5] * steps))
    assert not plain.running
    assert (costs.undrafted < 1.0) == known


def test_a_pause_is_timed_after_some_steps() -> None:
    plain, costs = world()
    plain.drafted()
    feed(plain, [0.5] * 16)
    assert costs.undrafted == 1.0, "drafts may still slow them down"
    feed(plain, [0.5] * 8)
    assert costs.undrafted == pytest.approx(0.5, rel=0.1)
    plain.drafted()
    feed(plain, [1.0] * 16)
    assert costs.undrafted == pytest.approx(0.5, rel=0.1)


def test_steps_that_are_skipped_count() -> None:
    plain, costs = world()
    plain.drafted()
    held = choice(left=63)
    while held.left:
        assert plain.pause(held) < 8
        plain.observe(held, StepTiming(0.0, 0.0, 0.5, 0.5))
        held.left -= 1
    assert costs.undrafted < 0.6
