"""In which order requests are served, and that no order keeps anybody waiting for ever."""

from __future__ import annotations

import pytest

from speculant.config import POLICIES as NAMES
from speculant.scheduling.order import PATIENCE, POLICIES, Standing
from tests.unit.scheduling.driver import Driver, blocks, counts, slots

every_policy = pytest.mark.parametrize("policy", NAMES)


def standing(arrival: int = 0, priority: int = 0, queued_at: int = 0, held: int = 0, backlog: int = 10) -> Standing:
    return Standing(arrival, priority, queued_at, held, backlog)


def test_the_configuration_lists_every_policy() -> None:
    assert set(NAMES) == set(POLICIES)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("first-come", ["long", "short", "running", "low"]),
        ("decode-first", ["running", "low", "long", "short"]),
        ("shortest-prompt", ["running", "short", "long", "low"]),
    ],
)
def test_each_policy_serves_in_its_own_order(policy: str, order: list[str]) -> None:
    standings = {
        "low": standing(0, priority=1, held=3, backlog=1),
        "long": standing(1, backlog=50),
        "short": standing(2, backlog=5),
        "running": standing(3, held=20, backlog=1),
    }
    assert sorted(standings, key=lambda name: POLICIES[policy](standings[name])) == order


@every_policy
def test_of_equals_the_first_comes_first(policy: str) -> None:
    assert POLICIES[policy](standing(1)) < POLICIES[policy](standing(2))


@every_policy
def test_a_lower_priority_is_served_sooner(policy: str) -> None:
    assert POLICIES[policy](standing(2, priority=-1)) < POLICIES[policy](standing(1, priority=0))


@every_policy
@pytest.mark.parametrize("backlog", [1, 5])
def test_a_long_wait_puts_a_request_before_all_new_ones(policy: str, backlog: int) -> None:
    patient = standing(1, priority=2, backlog=50)
    assert POLICIES[policy](patient) < POLICIES[policy](standing(2, queued_at=3 * PATIENCE, backlog=backlog))
    assert POLICIES[policy](patient) > POLICIES[policy](standing(2, queued_at=2 * PATIENCE - 1, backlog=backlog))


def last_overtaker(driver: Driver, length: int, priority: int) -> int:
    """Serve a long prompt while two short ones come at every step; return the last one that starts before it."""
    patient = driver.add(40, priority=priority)

    def is_served() -> bool:
        for _ in range(2):
            driver.add(length, max_tokens=2)
        return patient.finished

    driver.steps_until(is_served)
    return max(request.seq_id for request in driver.started[: driver.started.index(patient) + 1])


@pytest.mark.covering(1)
@every_policy
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("priority", [0, 2])
def test_no_request_waits_forever(policy: str, length: int, priority: int) -> None:
    """Twice as many short requests as can be served, and a long one that is less urgent than they are."""
    driver = Driver(slots(2), max_num_seqs=2, budget=8, policy=policy, max_waiting=10_000)
    assert last_overtaker(driver, length, priority) <= 2 * (priority + 1) * PATIENCE


@every_policy
def test_no_request_waits_for_memory_forever(policy: str) -> None:
    """The long prompt needs nearly all blocks at once; there is always a request that needs few."""
    driver = Driver(blocks(12), budget=16, policy=policy, max_waiting=10_000)
    assert last_overtaker(driver, 6, priority=1) <= 2 * 2 * PATIENCE


def test_no_prompt_delays_a_running_text() -> None:
    driver = Driver(slots(2), budget=8)
    text = driver.add(2, max_tokens=20)
    driver.step()
    driver.add(60)
    for _ in range(6):
        assert counts(driver.step()) == {text.seq_id: 1, 1: 7}


def test_first_come_computes_an_earlier_prompt_before_decodes() -> None:
    driver = Driver(slots(2), budget=8, policy="first-come")
    driver.add(20)
    driver.add(2)
    assert [counts(driver.step()) for _ in range(3)] == [{0: 8}, {0: 8}, {0: 4, 1: 2}]


def test_the_shortest_prompt_starts_first() -> None:
    driver = Driver(slots(1), max_num_seqs=1, policy="shortest-prompt")
    requests = [driver.add(length) for length in (9, 3, 6)]
    driver.steps_until(lambda: requests[0].finished)
    assert driver.started == [requests[1], requests[2], requests[0]]
