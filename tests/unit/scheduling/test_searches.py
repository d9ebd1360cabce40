"""The hypotheses of a beam search are rows that have to be computed: all at once, or some at a time."""

from __future__ import annotations

import dataclasses

import pytest

from speculant.beams import Beams
from speculant.scheduling import ALONE_S, Schedule, Scheduled
from speculant.types import Request, StepWork, WorkRate
from tests.beams import beams_of, give_search, hypotheses, scored, text_of
from tests.unit.scheduling.driver import Driver, blocks, slots

LIVE = ((1, 2, 3), (1, 2, 4), (1, 5, 3), (6, 2, 7))  # nine nodes: 3 + 1 + 2 + 3


def search(driver: Driver, num_prompt: int = 5, trunk: tuple[int, ...] = (), reach: int = 50) -> Request:
    """Queue a search with four hypotheses after a trunk."""
    request = driver.add(num_prompt, max_tokens=30)
    live = hypotheses(trunk + text for text in LIVE)
    give_search(request, Beams(4, 1.0, frozenset(), 30, reach, len(trunk) + 3, live))
    request.tokens += trunk
    request.params = dataclasses.replace(request.params, beam_width=4)
    return request


def paths(item: Scheduled) -> list[tuple[int, ...]]:
    """Return the hypotheses that a step computes completely."""
    return [text for text in LIVE if len(item.tree.path_along(text)) == len(text)]


def next_after_feeding(driver: Driver, tokens: int, request: Request) -> Schedule:
    """Schedule a request of which a number of tokens is in the cache."""
    driver.scheduler.running.append(request)
    driver.scheduler.waiting.remove(request)
    driver.cache.reserve(request.seq_id, tokens)
    return driver.scheduler.schedule()


@pytest.mark.parametrize(
    ("budget", "fed"),
    [(50, LIVE), (10, LIVE), (9, LIVE[:3]), (7, LIVE[:3]), (6, LIVE[:2]), (5, LIVE[:2]), (4, LIVE[:1])],
)
def test_as_many_hypotheses_are_computed_as_fit(budget: int, fed: tuple[tuple[int, ...], ...]) -> None:
    driver = Driver(slots(1), max_num_seqs=1, budget=budget)
    schedule = next_after_feeding(driver, 4, search(driver))
    (item,) = schedule.items
    assert (item.count, paths(item)) == (1, list(fed))
    assert schedule.spare_tokens == budget - item.num_rows == budget - 1 - item.tree.size
    assert schedule.plan.room(item.request.seq_id) == 100 - 4 - item.num_rows
    assert item.decodes == (fed == LIVE)


@pytest.mark.parametrize(("results", "fed"), [(4, LIVE), (3, LIVE[:3]), (2, LIVE[:2]), (0, LIVE[:1])])
def test_as_many_hypotheses_are_computed_as_there_is_time_for(results: int, fed: tuple[tuple[int, ...], ...]) -> None:
    """One hypothesis is computed in any case."""
    driver = Driver(slots(1), max_num_seqs=1)
    request = search(driver)
    request.work = StepWork(WorkRate(ALONE_S / (results + 0.5)))
    (item,) = next_after_feeding(driver, 4, request).items
    assert (item.count, paths(item)) == (1, list(fed))


def test_scored_hypotheses_are_not_computed_again() -> None:
    driver = Driver(slots(1), budget=7)
    request = search(driver)
    beams = beams_of(request)
    give_search(request, beams.advance(scored(beams, dict.fromkeys(LIVE[:2], ((1, -1.0),)))))
    (item,) = next_after_feeding(driver, 4, request).items
    assert paths(item) == list(LIVE[2:])


def test_a_newest_token_waits_for_a_pass_with_a_hypothesis() -> None:
    driver = Driver(slots(1), budget=7)
    request = search(driver, num_prompt=9)
    (item,) = driver.scheduler.schedule().items
    assert (item.count, item.completes) == (7, False)
    driver.cache.reserve(request.seq_id, 4)
    (item,) = driver.scheduler.schedule().items
    assert (item.count, paths(item)) == (5 - 1, [])
    driver.cache.reserve(request.seq_id, 4)
    (item,) = driver.scheduler.schedule().items
    assert (item.count, paths(item)) == (1, list(LIVE[:3]))


def test_decoding_continues_while_a_search_waits_for_room() -> None:
    driver = Driver(slots(3), budget=5)
    others = [driver.add(2) for _ in range(2)]
    driver.step()
    schedule = next_after_feeding(driver, 4, search(driver))
    assert [item.request for item in schedule.items] == others, "three rows are no room for a hypothesis of three"
    assert schedule.spare_tokens == 3
    driver.scheduler.remove(others[0])
    (other, item) = driver.scheduler.schedule().items
    assert (other.request, paths(item)) == (others[1], list(LIVE[:1]))


def test_a_search_that_waits_for_rows_preempts_no_request() -> None:
    """It does not lack memory: an earlier request uses up the pass, and a later one has a row."""
    driver = Driver(slots(3), max_num_seqs=3, budget=5, policy="first-come")
    prompt, request, last = driver.add(3), search(driver), driver.add(2)
    driver.start_all()
    driver.cache.reserve(request.seq_id, 4)
    driver.cache.reserve(last.seq_id, 1)
    schedule = driver.scheduler.schedule()
    assert [item.request for item in schedule.items] == [prompt, last]
    assert schedule.preempted == []


def test_the_last_request_makes_room_for_a_hypothesis() -> None:
    driver = Driver(blocks(4), max_num_seqs=2)
    request = search(driver, num_prompt=7)
    later = driver.add(8)
    driver.start_all()
    driver.cache.reserve(request.seq_id, 6)
    driver.cache.reserve(later.seq_id, 7)
    schedule = driver.scheduler.schedule()
    assert schedule.preempted == [later]
    assert [paths(item) for item in schedule.items] == [list(LIVE)]


def test_a_hypothesis_is_room_that_newcomers_leave() -> None:
    """Of 16 positions the search has 5 and needs 3 more; a prompt of 9 would take them, one of 8 does not."""
    for length, fits in ((9, False), (8, True)):
        driver = Driver(blocks(4), max_num_seqs=2)
        request = search(driver)
        driver.scheduler.schedule()
        driver.cache.reserve(request.seq_id, 4)
        later = driver.add(length)
        assert driver.scheduler.schedule().admitted == [later] * fits


def test_distant_hypotheses_are_reached_one_after_another() -> None:
    """Of three places two are within reach: the trunk is the first place of the best that waits."""
    driver = Driver(slots(1), budget=50)
    request = search(driver, reach=2)
    beams = beams_of(request)
    assert (text_of(beams.trunk), beams.together) == ((1,), False)
    request.tokens += beams.trunk.tokens()
    (item,) = next_after_feeding(driver, 5, request).items
    assert item.tree.token_list == [2, 3, 4, 5, 3]
    assert not item.decodes
    after = beams.advance(scored(beams, dict.fromkeys(LIVE[:3], ((1, -1.0),))))
    assert text_of(after.trunk) == (6,)
