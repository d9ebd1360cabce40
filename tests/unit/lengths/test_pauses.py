"""A policy that drafts nothing for a while is not called in every step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typing_extensions import override

from speculant.lengths import DraftLength, DraftOutcome, GuardedLength
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from tests.unit.scheduling.driver import Driver, slots


class Pausing(DraftLength):
    """Chooses drafts of one length, and pauses where that is 0."""

    def __init__(self, length: int, steps: int, keeps_up: bool = False) -> None:
        self._length, self._steps, self.keeps_up = length, steps, keeps_up

    @override
    def choose(self, schedule: Schedule) -> list[int]:
        return [self._length] * len(schedule.items)

    @override
    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Nothing is learnt."""

    @override
    def pause(self) -> int:
        return self._steps


def decoding(sequences: int = 2) -> Driver:
    """Return a driver whose sequences all decode."""
    driver = Driver(slots(4))
    for _ in range(sequences):
        driver.add(3, max_tokens=20)
    driver.step()
    return driver


def pauses_of(guarded: GuardedLength, driver: Driver, steps: int) -> list[bool]:
    """Return for each step whether the policy is paused; where it is not, it chooses."""
    return [guarded.choose(driver.step()) is None for _ in range(steps)]


def test_a_pause_has_the_length_that_the_policy_chose() -> None:
    assert pauses_of(GuardedLength(Pausing(0, 2)), decoding(), 7) == [False, True, True, False, True, True, False]


@pytest.mark.parametrize("policy", [Pausing(1, 2), Pausing(0, 0), Pausing(0, 2, keeps_up=True)])
def test_a_policy_without_a_pause_chooses_in_every_step(policy: Pausing) -> None:
    assert pauses_of(GuardedLength(policy), decoding(), 3) == [False] * 3


def test_a_new_sequence_ends_a_pause() -> None:
    driver, guarded = decoding(), GuardedLength(Pausing(0, 9))
    assert pauses_of(guarded, driver, 2) == [False, True]
    driver.add(3, max_tokens=20)
    assert pauses_of(guarded, driver, 3) == [False, False, True], "its prompt, then three that decode"


def test_a_removed_sequence_ends_a_pause() -> None:
    driver, guarded = decoding(), GuardedLength(Pausing(0, 9))
    assert pauses_of(guarded, driver, 2) == [False, True]
    driver.scheduler.remove(driver.scheduler.running[0])
    assert pauses_of(guarded, driver, 2) == [False, True]
