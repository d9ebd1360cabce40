"""A policy that drafts nothing for a while is not asked in every step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculant.lengths.base import DraftOutcome
from speculant.lengths.choice import Choice
from speculant.lengths.guarded import GuardedLength
from speculant.metrics import StepTiming
from speculant.scheduling.scheduler import Schedule
from tests.unit.scheduling.driver import Driver, slots


class Restful:
    """Wants drafts of one length, and rests where that is 0."""

    def __init__(self, length: int, steps: int, keeps_up: bool = False) -> None:
        self._length, self._steps, self.keeps_up = length, steps, keeps_up

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        return [self._length] * len(schedule.items)

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`."""

    def rest(self) -> int:
        """See `RestingLength.rest`."""
        return self._steps


def decoding(sequences: int = 2) -> Driver:
    """Return a driver whose sequences all decode."""
    driver = Driver(slots(4))
    for _ in range(sequences):
        driver.add(3, max_tokens=20)
    driver.step()
    return driver


def rests_of(guarded: GuardedLength, driver: Driver, steps: int) -> list[bool]:
    """Say of each step whether the policy rests; where it does not, it is asked."""
    rests = list[bool]()
    for _ in range(steps):
        schedule = driver.step()
        rests.append(guarded.rests(schedule))
        if not rests[-1]:
            guarded.choose(schedule)
    return rests


def test_a_rest_lasts_as_long_as_the_policy_says() -> None:
    assert rests_of(GuardedLength(Restful(0, 2)), decoding(), 7) == [False, True, True, False, True, True, False]


@pytest.mark.parametrize("policy", [Restful(1, 2), Restful(0, 0), Restful(0, 2, keeps_up=True)])
def test_policies_without_a_rest_are_always_asked(policy: Restful) -> None:
    assert rests_of(GuardedLength(policy), decoding(), 3) == [False] * 3


def test_a_sequence_that_comes_ends_a_rest() -> None:
    driver, guarded = decoding(), GuardedLength(Restful(0, 9))
    assert rests_of(guarded, driver, 2) == [False, True]
    driver.add(3, max_tokens=20)
    assert rests_of(guarded, driver, 3) == [False, False, True], "its prompt, then three that decode"


def test_a_sequence_that_goes_ends_a_rest() -> None:
    driver, guarded = decoding(), GuardedLength(Restful(0, 9))
    assert rests_of(guarded, driver, 2) == [False, True]
    driver.scheduler.remove(driver.scheduler.running[0])
    assert rests_of(guarded, driver, 2) == [False, True]


@pytest.mark.parametrize(("left", "skipped"), [(63, 6), (57, 0), (56, 7), (8, 7), (7, 6), (1, 0), (0, 0)])
def test_a_choice_skips_to_the_next_watched_step(left: int, skipped: int) -> None:
    choice = Choice([], [0], 1, 1.0, True, left)
    assert (choice.rest(8), choice.left) == (skipped, left - skipped)


def test_no_rest_where_a_sequence_does_not_decode() -> None:
    assert Choice([], [0], 1, 1.0, False, 63).rest(8) == 0
