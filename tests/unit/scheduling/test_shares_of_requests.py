"""A client's requests share its places, rows and memory: a small one does not wait for the many samples of another."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from speculant.beams import Beams
from speculant.config import POLICIES
from speculant.scheduling import PATIENCE
from speculant.types import ANYONE, Client, Request
from tests.beams import give_search, hypotheses
from tests.unit.scheduling.driver import BLOCK, Driver, blocks, slots

OTHER = Client("other")


def samples(
    driver: Driver, n: int, num_prompt: int = 3, max_tokens: int = 60, priority: int = 0, client: Client = ANYONE
) -> list[Request]:
    """Queue one request of n sequences."""
    name = f"samples-{len(driver.requests)}"
    return [driver.add(num_prompt, max_tokens, name, token=5, priority=priority, client=client) for _ in range(n)]


def prompts(driver: Driver, count: int, max_tokens: int = 60) -> list[Request]:
    """Queue a call of many prompts."""
    call = Client(ANYONE.name, call=f"call-{len(driver.requests)}")
    return [driver.add(3, max_tokens, client=call) for _ in range(count)]


KINDS = (samples, prompts)


def running(driver: Driver) -> Counter[str]:
    """Return how many sequences of each request run."""
    return Counter("/".join(request.call) for request in driver.scheduler.running)


def steps_to_first_token(driver: Driver, request: Request) -> int:
    return driver.steps_until(lambda: request.num_output > 0)


# --- places


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", [3, 3 * PATIENCE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_request_takes_a_place_of_many(
    kind: Callable[[Driver, int], list[Request]], policy: str, before: int
) -> None:
    """However long they run already."""
    driver = Driver(slots(4), policy=policy)
    many = kind(driver, 128)
    for _ in range(before):
        driver.step()
    small = driver.add(5, max_tokens=2)
    schedule = driver.step()
    assert schedule.admitted == [small]
    assert [request in many for request in schedule.preempted] == [True]
    assert small.num_output == 1
    driver.step()
    assert driver.step().admitted[0] is schedule.preempted[0], "it gets the place back"
    for request in many[12:]:
        driver.scheduler.remove(request) if not request.finished else None
    driver.finish()
    assert sum(request.metrics.num_preemptions for request in driver.requests) == 1
    assert all(request.num_output == 60 for request in many[:12])


def test_large_requests_leave_places_for_others() -> None:
    driver = Driver(slots(8), max_num_seqs=8)
    groups = [kind(driver, 16) for kind in (samples, prompts, samples)]
    for _ in range(5):
        driver.step()
    assert running(driver).total() == 8
    assert len(running(driver)) == 3, "none waits for the end of another one"
    small = driver.add(5, max_tokens=2)
    assert steps_to_first_token(driver, small) == 1
    driver.steps_until(lambda: groups[0][0].finished)
    assert max(running(driver).values()) - min(running(driver).values()) <= 1, "places that become free are shared"
    driver.finish()


@pytest.mark.parametrize("places", [1, 2])
def test_more_requests_than_places_take_turns(places: int) -> None:
    """A small one waits for the end of a sequence, and not of a request. So does every request of several samples."""
    driver = Driver(slots(places), max_num_seqs=places)
    groups = [samples(driver, 6, max_tokens=20) for _ in range(2)]
    for _ in range(5):
        driver.step()
    small = [driver.add(5, max_tokens=20) for _ in range(2)]
    driver.finish()
    order = [request.request_id for request in driver.started]
    assert sum(request.metrics.num_preemptions for request in driver.requests) == 0
    for request in (*small, groups[1][0]):
        assert order.index(request.request_id) <= 5
    assert order.index(groups[0][1].request_id) == 0
    assert order.count(groups[0][0].request_id) == 6


def test_small_requests_do_not_stop_a_large_one() -> None:
    """It keeps a place, whatever comes."""
    driver = Driver(slots(3), max_num_seqs=3)
    many = samples(driver, 6, max_tokens=8)

    def is_served() -> bool:
        while len(driver.scheduler.waiting) < 10:
            driver.add(2, max_tokens=4)
        return all(request.finished for request in many)

    assert driver.steps_until(is_served) < 150
    assert sum(request.metrics.num_preemptions for request in many) <= 2


def test_single_sequences_are_served_as_they_came() -> None:
    driver = Driver(slots(2), max_num_seqs=2)
    requests = [driver.add(3, max_tokens=9) for _ in range(5)]
    driver.finish()
    assert driver.started == requests


@pytest.mark.parametrize(("priority", "waits"), [(-1, False), (0, False), (1, True)])
def test_samples_keep_places_from_a_less_urgent_one(priority: int, waits: bool) -> None:
    driver = Driver(slots(4))
    many = samples(driver, 8)
    for _ in range(3):
        driver.step()
    small = driver.add(5, max_tokens=2, priority=priority)
    assert (small not in driver.step().admitted) == waits
    driver.steps_until(lambda: small.num_output > 0)
    assert all(request in driver.started for request in many) == waits
    driver.finish()


def test_waiting_samples_keep_no_request_waiting() -> None:
    """Further samples of the most urgent request come first, but the place of the least urgent is not for them."""
    driver = Driver(slots(4))
    least = samples(driver, 2, priority=9)
    for _ in range(2):
        driver.step()
    most = samples(driver, 6, priority=1)
    for _ in range(3):
        driver.step()
    assert sorted(running(driver).values()) == [2, 2]
    later = driver.add(3, priority=5)
    schedule = driver.step()
    assert (schedule.admitted, schedule.preempted) == ([later], [least[1]])
    assert most[2] in driver.waiting


def test_a_less_urgent_request_is_served_in_the_end() -> None:
    """Requests of many samples come again and again, each more urgent; PATIENCE bounds the wait."""
    driver = Driver(slots(2), max_num_seqs=2)
    patient = driver.add(5, priority=1)
    for _ in range(2):
        driver.add(5, max_tokens=2)

    def is_served() -> bool:
        if len(driver.scheduler.waiting) < 20:
            samples(driver, 4, max_tokens=4)
        return patient.finished

    assert driver.steps_until(is_served) <= 4 * PATIENCE


def test_samples_do_not_delay_prompts_of_their_call() -> None:
    driver, call = Driver(slots(4)), Client(call="call")
    for place in range(8):
        driver.add(9, request_id=f"prompt-{place // 2}", token=place // 2, client=call)
    assert [request.seq_id for request in driver.step().admitted] == [0, 2, 4, 6]


def test_samples_wait_for_their_prompt_while_others_pass() -> None:
    driver = Driver(slots(4), budget=6)
    many = samples(driver, 6, num_prompt=40)
    driver.step()
    small = driver.add(5, max_tokens=2)
    assert driver.step().admitted == [small]
    assert [request for request in driver.scheduler.running if request in many] == many[:1]


# --- searches


def search(driver: Driver, width: int = 4, client: Client = ANYONE) -> Request:
    """Queue a beam search with live hypotheses of 8 tokens each."""
    request = driver.add(4, max_tokens=30, client=client)
    live = hypotheses(tuple(range(10 * beam, 10 * beam + 8)) for beam in range(width))
    give_search(request, Beams(width, 1.0, frozenset(), 30, 50, 8, live))
    request.params = dataclasses.replace(request.params, beam_width=width)
    return request


def test_a_search_leaves_rows_for_a_prompt() -> None:
    """Its hypotheses have 128 rows, and a step 60: they would take every row of every step."""
    driver = Driver(slots(4, 400), budget=60)
    searching = search(driver, width=16)
    driver.scheduler.schedule()
    driver.cache.reserve(searching.seq_id, 3)
    small = driver.add(40, max_tokens=2)
    rows = {item.request.seq_id: item.num_rows for item in driver.scheduler.schedule().items}
    assert rows[searching.seq_id] == 25, "its newest token and three hypotheses of eight; a fourth is more than half"
    assert rows[small.seq_id] == 35


def test_a_search_takes_the_place_of_a_sample() -> None:
    driver = Driver(slots(4, 400), budget=60)
    samples(driver, 12)
    for _ in range(3):
        driver.step()
    searching = search(driver)
    assert driver.scheduler.schedule().admitted == [searching]


# --- rows


def test_many_samples_leave_rows_for_a_prompt() -> None:
    """A step of as many rows as sequences: a prompt gets half of them, not one."""
    driver = Driver(slots(8), max_num_seqs=8, budget=8)
    samples(driver, 20)
    for _ in range(5):
        driver.step()
    small = driver.add(12)
    assert steps_to_first_token(driver, small) == 3


def test_samples_that_come_back_leave_rows() -> None:
    """Six texts of 60 tokens are computed again, with a budget of 20."""
    driver = Driver(slots(8), max_num_seqs=8, budget=20)
    samples(driver, 8, max_tokens=90)
    for _ in range(60):
        driver.step()
    small = [driver.add(2, max_tokens=2) for _ in range(7)]
    driver.steps_until(lambda: all(request.finished for request in small))
    later = driver.add(20, max_tokens=2)
    assert steps_to_first_token(driver, later) <= 3


# --- memory


def test_small_requests_find_memory_beside_samples() -> None:
    """They are not preempted for samples whose texts grow, and need not wait until enough of these have ended."""
    driver = Driver(blocks(30), max_num_seqs=8)
    many = samples(driver, 40, num_prompt=9, max_tokens=40)
    waits = []
    while not all(request.finished for request in many):
        small = driver.add(13, max_tokens=12)
        waits.append(steps_to_first_token(driver, small))
        driver.steps_until(lambda: small.finished)  # noqa: B023 - called at once
        assert small.metrics.num_preemptions == 0
    assert max(waits) == 1
    assert driver.cache.free_tokens() == 30 * BLOCK


def test_memory_for_one_text_is_shared_by_turns() -> None:
    driver = Driver(blocks(12), max_num_seqs=8)
    samples(driver, 10, num_prompt=9, max_tokens=30)
    for _ in range(5):
        driver.step()
    small = driver.add(30, max_tokens=10)
    assert driver.steps_until(lambda: small.finished) <= 2 * 40
    driver.finish()


# --- clients


def test_an_exchange_needs_no_place_of_another_client() -> None:
    """The other client has places by right, and its next request waits for a turn. It delays nothing."""
    driver = Driver(slots(8), max_num_seqs=8)
    for _ in range(10):
        driver.add(3, max_tokens=90, client=OTHER)
    samples(driver, 20, max_tokens=90)
    for _ in range(80):
        driver.step()
    by_client = Counter(request.sender.client.name for request in driver.scheduler.running)
    small = driver.add(5, max_tokens=2)
    assert steps_to_first_token(driver, small) == 1
    assert Counter(request.sender.client.name for request in driver.scheduler.running) == by_client


def test_a_surplus_sample_gives_way_first() -> None:
    driver = Driver(slots(4))
    many = samples(driver, 3)
    single = driver.add(3, max_tokens=60)
    for _ in range(3):
        driver.step()
    driver.add(5, max_tokens=2, client=OTHER)
    assert driver.step().preempted == [many[2]]
    assert single in driver.scheduler.running
