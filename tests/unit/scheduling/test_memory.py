"""Which requests are admitted, and which preempted, if memory does not suffice for all."""

from __future__ import annotations

import logging

import pytest

from speculant.config import POLICIES
from tests.unit.scheduling.driver import BLOCK, Driver, blocks, counts

# --- admission


def test_a_prompt_that_does_not_fit_waits_until_somebody_leaves() -> None:
    driver = Driver(blocks(5))
    first, second = driver.add(12), driver.add(12)
    assert driver.step().admitted == [first]
    assert driver.steps_until(lambda: first.finished) == 2
    assert driver.step().admitted == [second]


def test_missing_tokens_of_running_requests_are_counted() -> None:
    """After one chunk there is room for the second prompt beside it, but not beside all of the first one."""
    driver = Driver(blocks(6), budget=4)
    first, second = driver.add(16), driver.add(12)
    assert driver.step().admitted == [first]
    assert driver.cache.free_tokens() >= 12
    driver.steps_until(lambda: first.finished)
    assert driver.step().admitted == [second]
    assert second.metrics.num_preemptions == 0


def test_no_request_overtakes_a_prompt_that_does_not_fit() -> None:
    driver = Driver(blocks(6))
    for length in (12, 20, 2):
        driver.add(length)
    assert [driver.step().admitted for _ in range(2)] == [driver.requests[:1], []]


def test_a_request_alone_is_admitted_and_finishes() -> None:
    """A sequence that needs every block there is."""
    driver = Driver(blocks(5), budget=3)
    request = driver.add(17, max_tokens=4)
    driver.steps_until(lambda: request.finished)
    assert request.metrics.num_preemptions == 0


# --- setting aside


def test_the_last_one_makes_room_and_comes_back() -> None:
    driver = Driver(blocks(4))
    first, second = driver.add(7, max_tokens=9), driver.add(7, max_tokens=9)
    assert driver.step().admitted == [first, second]
    assert driver.step().preempted == []
    schedule = driver.step()  # both would need a third block, and there are four
    assert (schedule.preempted, counts(schedule)) == ([second], {0: 1})
    assert driver.waiting == [second]
    assert driver.cache.length(second.seq_id) == 0
    driver.steps_until(lambda: first.finished)
    schedule = driver.step()
    assert (schedule.admitted, counts(schedule)) == ([second], {1: 9}), "it feeds prompt and output again"
    driver.steps_until(lambda: second.finished)
    assert [request.metrics.num_preemptions for request in (first, second)] == [0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_is_by_priority_then_arrival_under_any_policy(policy: str) -> None:
    for priorities, last in (([0, 0, 0], 2), ([0, 1, 0], 1), ([2, 1, 1], 0)):
        driver = Driver(blocks(6), policy=policy)
        requests = [driver.add(7, max_tokens=9, priority=priority) for priority in priorities]
        preempted = driver.step().preempted + driver.step().preempted + driver.step().preempted
        assert preempted == [requests[last]]


def test_only_as_many_requests_are_preempted_as_needed() -> None:
    driver = Driver(blocks(12), max_num_seqs=6)
    requests = [driver.add(7, max_tokens=20) for _ in range(6)]
    for _ in range(2):
        assert driver.step().preempted == []
    schedule = driver.step()  # each running one needs a third block
    assert schedule.preempted == [requests[5], requests[4]]
    assert list(counts(schedule)) == [0, 1, 2, 3]


def test_two_half_processed_prompts_do_not_block_each_other() -> None:
    """Each is let in while the other's need is unknown, and together they do not fit."""
    driver = Driver(blocks(10), budget=6)
    first, second = driver.add(30), driver.add(30)
    driver.start_all()
    driver.cache.reserve(first.seq_id, 20)
    driver.cache.reserve(second.seq_id, 20)
    assert driver.cache.free_tokens() == 0
    assert driver.step().preempted == [second]
    driver.finish()
    assert [request.num_output for request in (first, second)] == [3, 3]


def test_the_first_request_always_advances() -> None:
    """The first request by rank gains a token in every step after its prompt, whatever the others do."""
    driver = Driver(blocks(8), budget=8)
    for length in (5, 9, 2, 14, 7):
        driver.add(length, max_tokens=12)
    while driver.scheduler.running or driver.scheduler.waiting:
        first = min((r for r in driver.requests if not r.finished), key=lambda r: r.seq_id)
        before = driver.cache.length(first.seq_id)
        driver.step()
        assert first.finished or driver.cache.length(first.seq_id) > before
        assert first.metrics.num_preemptions == 0 or first.seq_id > 0


def test_one_by_one_keeps_the_rows_planned_for_others() -> None:
    """When a step is repeated for each alone, a draft must not take the block that the next one was promised."""
    driver = Driver(blocks(6))
    for _ in range(2):
        driver.add(7, max_tokens=20)
    driver.step()
    driver.step()
    schedule = driver.scheduler.schedule()  # each is promised a third block, the last ones
    assert counts(schedule) == {0: 1, 1: 1}
    alone = list(schedule.one_by_one(driver.cache))
    assert [counts(each) for each in alone] == [{0: 1}, {1: 1}]
    assert alone[0].plan.room(0) == BLOCK - 1


def test_a_hit_is_counted_at_the_first_admission() -> None:
    driver = Driver(blocks(20, keep_prefixes=True))
    for _ in range(2):
        driver.add(2 * BLOCK + 3, token=5, max_tokens=9)
        driver.finish()
    assert [request.metrics.cached_tokens for request in driver.requests] == [0, 2 * BLOCK]


def test_a_resumed_request_s_own_prefix_is_not_counted_as_a_hit() -> None:
    driver = Driver(blocks(4, keep_prefixes=True))
    first, second = driver.add(7, max_tokens=3), driver.add(7, max_tokens=9)
    driver.steps_until(lambda: second.metrics.num_preemptions == 1)
    driver.steps_until(lambda: first.finished)
    schedule = driver.step()
    assert schedule.admitted == [second]
    assert counts(schedule)[second.seq_id] < len(second.tokens) - 1, "its first block was still there"
    assert second.metrics.cached_tokens == 0


def test_a_waiting_prompt_uses_a_prefix_computed_meanwhile() -> None:
    driver = Driver(blocks(20, keep_prefixes=True), budget=8)
    first, second = (driver.add(4 * BLOCK, token=5, max_tokens=9) for _ in range(2))
    assert driver.step().admitted == [first, second]
    assert driver.cache.length(second.seq_id) == 0
    driver.step()
    assert counts(driver.step()) == {first.seq_id: 1, second.seq_id: 1}
    assert second.metrics.cached_tokens == 4 * BLOCK - 1


def test_preemption_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(blocks(4))
    caplog.set_level(logging.DEBUG, "speculant.scheduling")
    driver.add(7, max_tokens=9), driver.add(7, max_tokens=9)
    driver.finish()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("speculant.scheduling.scheduler", "DEBUG")
    assert record.getMessage() == "request request-1 is preempted after 9 tokens"
