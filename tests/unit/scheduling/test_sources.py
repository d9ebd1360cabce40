"""Sources are encoded as a whole, in the order of their requests, and beside other sequences' tokens."""

from __future__ import annotations

import pytest

from speculant.config import POLICIES, Limits
from speculant.params import SamplingParams
from speculant.scheduling import Schedule
from speculant.types import Client, Ending
from tests.unit.scheduling.driver import BLOCK, Driver, blocks, counts, slots


def encoded(schedule: Schedule) -> list[int]:
    """Return the lengths of the sources that a step encodes, in order."""
    return [encoding.num_rows for encoding in schedule.sources]


def source(length: int, token: int = 3) -> list[int]:
    return [token] * length


def test_a_source_and_its_text_are_computed_in_one_step() -> None:
    driver = Driver(blocks(20), budget=12)
    driver.add(2, source=source(7))
    schedule = driver.step()
    assert (encoded(schedule), counts(schedule), schedule.spare_tokens) == ([7], {0: 2}, 3)
    assert encoded(driver.step()) == []


def test_a_source_that_does_not_fit_beside_others_waits_a_step() -> None:
    driver = Driver(blocks(40), budget=12)
    first, second = driver.add(1, source=source(8)), driver.add(1, source=source(7, 4))
    schedule = driver.step()
    assert (encoded(schedule), counts(schedule)) == ([8], {first.seq_id: 1})
    schedule = driver.step()
    assert (encoded(schedule), counts(schedule)) == ([7], {first.seq_id: 1, second.seq_id: 1})


def test_short_sources_do_not_overtake_a_long_one() -> None:
    """Otherwise a long source would wait for ever beside requests that keep coming."""
    driver = Driver(blocks(99), max_num_seqs=4, budget=12)
    driver.add(1, source=source(8))
    long = driver.add(1, source=source(9, 4))
    driver.add(1, source=source(1, 5))
    assert encoded(driver.step()) == [8]
    schedule = driver.step()
    assert encoded(schedule) == [9, 1]
    assert [request.seq_id for request in schedule.sources[0].requests] == [long.seq_id]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "shortest-prompt"])
def test_the_longest_source_is_encoded_beside_running_texts(policy: str) -> None:
    """It finds its rows at once, whatever comes later."""
    limits = Limits(100, 4, 12)
    driver = Driver(blocks(99), max_num_seqs=4, budget=12, policy=policy)
    for _ in range(3):
        driver.add(1, max_tokens=50, source=source(1))
    driver.step()
    longest = driver.add(1, max_tokens=2, source=source(limits.max_source_len, 4))
    for number in range(5):
        driver.add(1, max_tokens=2, source=source(2, 5 + number))
    assert driver.steps_until(lambda: longest.num_output > 0) <= 2


def test_a_beam_search_has_its_source_in_the_first_step() -> None:
    driver = Driver(blocks(99), max_num_seqs=2, budget=8)
    driver.add(1, source=source(6), params=SamplingParams(max_tokens=4, beam_width=2))
    schedule = driver.step()
    assert (encoded(schedule), counts(schedule)) == ([6], {0: 1})


def test_equal_sources_are_encoded_once() -> None:
    driver = Driver(blocks(40), budget=12)
    requests = [driver.add(1, source=source(5), max_tokens=length) for length in (2, 6)]
    schedule = driver.step()
    assert (encoded(schedule), counts(schedule)) == ([5], {0: 1, 1: 1})
    assert schedule.sources[0].requests == requests
    driver.steps_until(lambda: requests[0].finished)
    driver.add(1, source=source(5))
    assert encoded(driver.step()) == [], "the second text still holds it"
    driver.finish()
    driver.add(1, source=source(5))
    assert encoded(driver.step()) == [5]


def test_a_request_is_admitted_if_its_source_fits_too() -> None:
    driver = Driver(blocks(6))
    first, second = (driver.add(1, max_tokens=3, source=source(2 * BLOCK, token)) for token in (3, 4))
    assert driver.step().admitted == [first, second]
    third = driver.add(1, source=source(1, 5))
    assert driver.step().admitted == []
    driver.steps_until(lambda: first.finished)
    assert driver.step().admitted == [third]


def test_a_source_to_be_encoded_is_counted_in_admission() -> None:
    """The first request's source waits for its rows; the memory for it is not given to others."""
    driver = Driver(blocks(7), budget=12, max_num_seqs=3)
    driver.add(1, max_tokens=9, source=source(9))
    late = driver.add(1, max_tokens=9, source=source(9, 4))
    assert encoded(driver.step()) == [9]
    assert [request.seq_id for request in driver.scheduler.running] == [0]
    driver.finish()
    assert late.finished


def test_preemption_releases_the_source() -> None:
    driver = Driver(blocks(7))
    first, second = (driver.add(3, max_tokens=12, source=source(4, token)) for token in (3, 4))
    driver.step()
    driver.steps_until(lambda: bool(second.metrics.num_preemptions))
    assert driver.scheduler.sources.of(second.seq_id) is None
    assert driver.scheduler.sources.of(first.seq_id) is not None
    driver.finish()
    assert driver.cache.free_tokens() == 7 * BLOCK


def test_slots_are_enough_for_texts_and_sources() -> None:
    driver = Driver(slots(4), max_num_seqs=2)
    requests = [driver.add(1, source=source(5, token)) for token in (3, 4)]
    assert driver.step().admitted == requests
    driver.finish()


def test_sources_do_not_change_the_order_of_waiting_requests() -> None:
    """Keys of waiting requests stay the same while others encode an equal source."""
    driver = Driver(blocks(40), max_num_seqs=1, policy="shortest-prompt")
    driver.add(1, source=source(3), max_tokens=9)
    driver.step()
    longer, shorter = driver.add(4, source=source(3)), driver.add(1, source=source(5))
    assert driver.waiting == [shorter, longer]
    driver.step()
    assert driver.waiting == [shorter, longer]


def test_the_shortest_prompt_has_the_shortest_source() -> None:
    driver = Driver(blocks(40), max_num_seqs=1, policy="shortest-prompt")
    driver.add(1, max_tokens=9)
    driver.step()
    long, short = driver.add(1, source=source(9)), driver.add(4, source=source(5))
    assert driver.waiting == [short, long]


def test_rows_of_sources_are_charged_to_the_client() -> None:
    driver = Driver(blocks(99), budget=24)
    one, two = Client("one"), Client("two")
    driver.add(1, max_tokens=9, source=source(9), client=one)
    driver.add(1, max_tokens=9, source=source(3, 4), client=two)
    driver.step()
    accounts = driver.scheduler._accounts
    assert (accounts.of(one).counter, accounts.of(two).counter) == (10, 4)


def test_each_client_gets_the_rows_for_its_longest_source() -> None:
    """One client's texts and sources take many rows in each step; the other one's source is as long as may be."""
    driver = Driver(blocks(200), max_num_seqs=4, budget=16)
    for token in range(8):
        driver.add(1, max_tokens=3, source=source(7, 10 + token), client=Client("busy"))
    longest = driver.add(1, max_tokens=2, source=source(Limits(100, 4, 16).max_source_len), client=Client("other"))
    assert driver.steps_until(lambda: longest.num_output > 0) <= 4
    driver.finish()


def test_a_source_finds_its_rows_beside_the_client_s_own_texts() -> None:
    """The client gets a row for each of its texts too, as they come before the source."""
    driver, own = Driver(blocks(200), max_num_seqs=6, budget=20), Client("own")
    for _ in range(3):
        driver.add(1, max_tokens=60, client=own)
    for token in range(2):
        driver.add(90, max_tokens=2, token=token, client=Client("busy"))
    driver.step()
    longest = driver.add(1, max_tokens=2, source=source(Limits(100, 6, 20).max_source_len), client=own)
    assert driver.steps_until(lambda: longest.num_output > 0) <= 4


def test_a_failed_step_drops_its_sources() -> None:
    driver = Driver(blocks(40), budget=24)
    driver.add(2, source=source(5))
    driver.step()
    driver.add(2, source=source(6, 4))
    schedule = driver.scheduler.schedule()
    for encoding in schedule.sources:
        driver.cache.reserve(encoding.source.seq_id, encoding.num_rows)
    held = {each.seq_id: driver.cache.length(each.seq_id) for each in driver.scheduler.sources._by_key.values()}
    schedule.roll_back(driver.cache)
    after = {seq_id: driver.cache.length(seq_id) for seq_id in held}
    assert (sorted(held.values()), sorted(after.values())) == ([5, 6], [0, 5])


def test_one_by_one_a_source_comes_before_its_texts() -> None:
    driver = Driver(blocks(40), budget=24)
    first, second = (driver.add(1, source=source(5)) for _ in range(2))
    other = driver.add(1, source=source(6, 4))
    schedule = driver.scheduler.schedule()
    assert schedule.culprits() == ()
    alone = list(schedule.one_by_one(driver.cache))
    assert [(encoded(each), [*counts(each)]) for each in alone] == [
        ([5], []), ([6], []), ([], [first.seq_id]), ([], [second.seq_id]), ([], [other.seq_id]),
    ]  # fmt: skip
    assert [[request.seq_id for request in each.culprits()] for each in alone] == [[0, 1], [2], [0], [1], [2]]
    first.ending = second.ending = Ending("error")
    assert len(list(schedule.one_by_one(driver.cache))) == 3, "texts without their source are left out"
