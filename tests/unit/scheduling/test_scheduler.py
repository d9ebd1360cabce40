"""The tokens of each step: the budget is kept, decoding comes first, samples wait for their first one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from speculant.config import POLICIES
from speculant.errors import CapacityError
from speculant.scheduling import Key, Scheduled
from speculant.types import ANYONE, Request
from tests.examples import examples
from tests.models import make_request
from tests.unit.scheduling.driver import BLOCK, Driver, blocks, counts, slots


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    max_num_seqs=st.integers(1, 5),
    extra=st.integers(0, 10),
    num_blocks=st.integers(9, 50),  # one sequence of 32 and a little more, up to all
    policy=st.sampled_from(POLICIES),
)
def test_every_request_is_served_within_budget_and_memory(
    prompts: list[int], max_num_seqs: int, extra: int, num_blocks: int, policy: str
) -> None:
    """Reserving raises if there is no memory, so the steps themselves show that the planned memory is there."""
    budget = max_num_seqs + extra
    driver = Driver(blocks(num_blocks), max_num_seqs=max_num_seqs, budget=budget, policy=policy)
    requests = [driver.add(length) for length in prompts]
    while driver.scheduler.waiting or driver.scheduler.running:
        schedule = driver.step()
        assert schedule.items, "a step that does nothing"
        assert len(driver.scheduler.running) <= max_num_seqs
        assert sum(item.count for item in schedule.items) == budget - schedule.spare_tokens <= budget
        assert all(item.count >= 1 for item in schedule.items)
    assert [request.num_output for request in requests] == [3] * len(requests)
    assert driver.cache.free_tokens() == num_blocks * BLOCK


def test_long_prompts_are_processed_in_chunks() -> None:
    driver = Driver(slots(1), budget=8)
    driver.add(20)
    items = [item for _ in range(4) for item in driver.step().items]
    assert [(item.start, item.count) for item in items] == [(0, 8), (8, 8), (16, 4), (20, 1)]


def test_caught_up_requests_go_before_an_earlier_prompt() -> None:
    driver = Driver(slots(3), max_num_seqs=3, budget=5)
    driver.add(30)
    first, second = driver.add(6), driver.add(6)
    for request in (first, second):
        driver.cache.reserve(request.seq_id, 5)
    driver.start_all()
    assert counts(driver.step()) == {1: 1, 2: 1, 0: 3}


def test_prompts_share_the_rest_of_the_budget_by_arrival() -> None:
    driver = Driver(slots(3), budget=8)
    for length in (3, 30, 30):
        driver.add(length)
    assert counts(driver.step()) == {0: 3, 1: 5}


def test_drafts_may_use_the_rest_of_a_step_s_budget() -> None:
    driver = Driver(slots(3), budget=8)
    driver.add(3)
    driver.add(2)
    assert driver.step().spare_tokens == 3


def test_a_step_computes_tokens_that_are_not_in_the_cache() -> None:
    request = make_request([10, 11, 12, 13], [20])
    assert Scheduled(request, 1, 2).tokens == [11, 12]
    assert not Scheduled(request, 1, 2).completes
    assert Scheduled(request, 3, 2).tokens == [13, 20]
    assert Scheduled(request, 3, 2).completes
    assert not Scheduled(request, 3, 2).decodes
    assert Scheduled(request, 4, 1).decodes


def test_waiting_requests_start_in_order_when_there_is_room() -> None:
    driver = Driver(slots(2), max_num_seqs=2)
    requests = [driver.add(2) for _ in range(5)]
    assert driver.step().admitted == requests[:2]
    assert driver.step().admitted == []
    driver.scheduler.remove(requests[0])
    assert driver.step().admitted == requests[2:3]
    assert driver.waiting == requests[3:]


def test_a_request_leaves_from_any_state_and_frees_its_memory() -> None:
    driver = Driver(slots(1), max_num_seqs=1)
    requests = [driver.add(2) for _ in range(3)]
    driver.step()
    driver.scheduler.remove(requests[1])
    assert driver.waiting == requests[2:]
    driver.scheduler.remove(requests[0])
    assert driver.scheduler.running == []
    assert driver.cache.length(0) == 0
    with pytest.raises(KeyError):
        driver.scheduler.remove(requests[0])


def test_samples_wait_until_the_first_has_computed_their_prompt() -> None:
    driver = Driver(slots(3), budget=6)
    samples = [driver.add(10, request_id="same", token=5) for _ in range(3)]
    assert [driver.step().admitted for _ in range(3)] == [samples[:1], [], samples[1:]]
    assert [driver.cache.length(sample.seq_id) for sample in samples] == [11, 10, 10], "they fed just their last token"
    assert [sample.metrics.cached_tokens for sample in samples] == [0, 9, 9]


def test_samples_share_blocks() -> None:
    driver = Driver(blocks(20), budget=40)
    samples = [driver.add(9, max_tokens=9, request_id="same", token=5) for _ in range(4)]
    driver.step()
    driver.step()
    tables = [driver.cache.table(sample.seq_id).tolist() for sample in samples]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 4
    assert len({table[2] for table in tables}) == 4, "each one writes to a block of its own"
    assert driver.cache.free_tokens() == (20 - 2 - 4) * BLOCK


def test_the_same_prompt_under_another_name_does_not_wait() -> None:
    driver = Driver(slots(2))
    requests = [driver.add(10, token=5) for _ in range(2)]
    assert driver.step().admitted == requests


# --- the queue


def test_a_full_queue_refuses_requests_with_its_sizes() -> None:
    """Whether those that may run do so yet makes no difference."""
    driver = Driver(slots(1), max_num_seqs=1, max_waiting=2)
    queued = [driver.add(2), driver.add(2), driver.add(2)]
    for running in (0, 1):
        message = f"{running} sequences run and {3 - running} wait, 1 more came and max_num_seqs . max_waiting is 3"
        with pytest.raises(CapacityError, match=message) as caught:
            driver.add(2)
        assert caught.value.fix == "try again later, or raise max_waiting."
        assert driver.waiting == queued[running:]
        assert driver.scheduler.num_vacant(ANYONE) == 0
        driver.step()
    driver.steps_until(lambda: driver.scheduler.num_vacant(ANYONE) == 1)


def test_samples_are_queued_together_or_not_at_all() -> None:
    driver = Driver(slots(1), max_num_seqs=1, max_waiting=1)
    samples = [make_request([1], seq_id=seq_id, request_id="same") for seq_id in range(3)]
    with pytest.raises(CapacityError):
        driver.scheduler.add(samples)
    assert driver.waiting == []
    driver.scheduler.add(samples[:2])
    assert driver.waiting == samples[:2]


def test_a_preempted_request_finds_room_in_a_full_queue() -> None:
    driver = Driver(blocks(4), max_num_seqs=2, max_waiting=2)
    for _ in range(2):
        driver.add(7, max_tokens=9)
    driver.step()
    driver.add(7)
    driver.add(7)
    driver.steps_until(lambda: len(driver.scheduler.waiting) == 3)
    assert driver.scheduler.num_vacant(ANYONE) == 0


def test_scheduler_lets_others_pass_samples_that_wait() -> None:
    """While the first of many samples processes a long prompt, free slots go to later requests."""
    driver = Driver(slots(4), budget=6)
    samples = [driver.add(40, request_id="same", token=5) for _ in range(6)]
    later = [driver.add(2, max_tokens=1) for _ in range(2)]
    assert driver.step().admitted == [samples[0], *later]
    driver.steps_until(lambda: samples[0].num_output > 0)
    assert driver.step().admitted[0] == samples[1]
    driver.finish()
    assert all(request.num_output for request in (*samples, *later))


def test_scheduler_readmits_samples_whose_first_one_left() -> None:
    driver = Driver(slots(2), max_num_seqs=2, budget=4)
    samples = [driver.add(40, request_id="same", token=5) for _ in range(3)]
    driver.step()
    driver.scheduler.remove(samples[0])
    assert driver.step().admitted == [samples[1]]
    driver.steps_until(lambda: samples[1].num_output > 0)
    assert driver.step().admitted == [samples[2]]


def test_scheduler_compares_few_of_many_that_wait() -> None:
    """Admission must not look at all that wait: the place of one among 4,000 takes 12 comparisons."""
    driver = Driver(slots(1), max_num_seqs=1, max_waiting=5000)
    for _ in range(examples(4000, least=1000)):
        driver.add(2, max_tokens=1)
    looked_at = 0
    turn = driver.scheduler.standings.turn

    def counting(request: Request) -> Key:
        nonlocal looked_at
        looked_at += 1
        return turn(request)

    driver.scheduler.standings.turn = counting  # type: ignore[method-assign]
    driver.scheduler.waiting._key = counting
    for _ in range(10):
        driver.scheduler.schedule()
    assert looked_at < 100
