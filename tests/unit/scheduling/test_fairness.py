"""Fair shares of places, rows and memory: whatever one client sends, another one is served in its turn."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from speculant.config import POLICIES
from speculant.errors import CapacityError, RequestError
from speculant.scheduling import (
    TURN,
    Account,
    Accounts,
    Holding,
    divide,
    places_of,
    scheduler as scheduler_module,
    yields,
)
from speculant.types import ANYONE, Client, Request
from tests.unit.scheduling.driver import BLOCK, Driver, blocks, counts, slots

GREEDY, OTHER, THIRD = Client("greedy"), Client("other"), Client("third")


def flood(
    driver: Driver, count: int, client: Client = GREEDY, max_tokens: int = 90, num_prompt: int = 3
) -> list[Request]:
    """Queue many long answers of one client."""
    return [driver.add(num_prompt, max_tokens=max_tokens, client=client) for _ in range(count)]


def running(driver: Driver) -> Counter[str]:
    """Return how many sequences of each client run."""
    return Counter(request.sender.client.name for request in driver.scheduler.running)


# --- places


@pytest.mark.parametrize("policy", POLICIES)
def test_a_newcomer_takes_a_place_of_the_one_with_most(policy: str) -> None:
    """Its first token comes in the step after its arrival, and the one that gave way is the last by rank."""
    driver = Driver(slots(4), policy=policy)
    flooding = flood(driver, 40)
    driver.step()
    newcomer = driver.add(5, max_tokens=2, client=OTHER)
    schedule = driver.step()
    assert (schedule.admitted, schedule.preempted) == ([newcomer], [flooding[3]])
    assert newcomer.num_output == 1
    driver.steps_until(lambda: flooding[3].finished)
    assert flooding[3].num_output == 90
    assert sum(request.metrics.num_preemptions for request in flooding) == 1


def test_priority_orders_the_requests_of_one_client_alone() -> None:
    driver = Driver(slots(2), max_num_seqs=2)
    for _ in range(6):
        driver.add(3, max_tokens=50, priority=-1_000_000, client=GREEDY)
    driver.step()
    low, high = (driver.add(3, max_tokens=9, priority=priority, client=OTHER) for priority in (7, 2))
    assert driver.step().admitted == [high]
    assert low.num_output == 0


def test_a_client_keeps_its_only_sequence_for_a_turn() -> None:
    """Three clients and two places: the one that has run a turn and used the most gives way, not sooner."""
    driver = Driver(slots(2), max_num_seqs=2)
    first = driver.add(9, max_tokens=90, client=GREEDY)
    second = driver.add(3, max_tokens=90, client=OTHER)
    driver.step()
    third = driver.add(3, max_tokens=90, client=THIRD)
    steps = driver.steps_until(lambda: third.num_output > 0)
    assert (steps, first.metrics.num_preemptions, second.metrics.num_preemptions) == (TURN, 1, 0)
    driver.finish()
    assert all(request.num_output == 90 for request in (first, second, third))


def test_turns_save_the_rows_of_preempted_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With turns of a token, most rows are tokens that were computed before."""

    def rows_per_token(turn: int) -> float:
        monkeypatch.setattr(scheduler_module, "TURN", turn)
        driver, rows = Driver(slots(2), max_num_seqs=2), 0
        for client in (GREEDY, OTHER, THIRD):
            driver.add(9, max_tokens=90, client=client)
        while driver.scheduler.running or driver.scheduler.waiting:
            rows += sum(counts(driver.step()).values())
        return rows / (3 * 90)

    assert rows_per_token(1) > 5
    assert rows_per_token(TURN) < 2


def test_places_are_shared_by_turns_if_all_clients_have_more() -> None:
    """Two that want everything have half each within two turns, and give each other nothing more after that."""
    driver = Driver(slots(8), max_num_seqs=8)
    flood(driver, 40)
    driver.step()
    flood(driver, 40, OTHER)
    driver.step()
    assert running(driver) == {"greedy": 7, "other": 1}
    for _ in range(TURN):
        driver.step()
    assert running(driver) == {"greedy": 4, "other": 4}
    assert sum(request.metrics.num_preemptions for request in driver.requests) == 4
    driver.finish()
    assert sum(request.metrics.num_preemptions for request in driver.requests) < 12


@pytest.mark.parametrize(
    ("weight", "share"), [pytest.param(1.0, 1 / 2, marks=pytest.mark.slow), (3.0, 3 / 4), (1 / 3, 1 / 4)]
)
def test_tokens_are_shared_by_weight(weight: float, share: float) -> None:
    driver = Driver(slots(4), max_num_seqs=4)
    clients = Client("heavy", weight), OTHER
    for client in clients:
        flood(driver, 60, client, max_tokens=20)
    for _ in range(200):
        driver.step()
    tokens = Counter[str]()
    for request in driver.requests:
        tokens[request.sender.client.name] += request.num_output
    assert tokens["heavy"] / tokens.total() == pytest.approx(share, abs=0.03)


def test_one_place_is_shared_by_the_tokens_used() -> None:
    """With one sequence at a time, the client that sends long texts gets fewer of them served: of 39 rows to 9."""
    driver = Driver(slots(1), max_num_seqs=1)
    for _ in range(40):
        driver.add(20, max_tokens=20, client=GREEDY)
        driver.add(5, max_tokens=5, client=OTHER)
        driver.add(5, max_tokens=5, client=OTHER)
    for _ in range(400):
        driver.step()
    ended = Counter(request.sender.client.name for request in driver.requests if request.finished)
    assert ended["other"] == pytest.approx(39 / 9 * ended["greedy"], abs=4)


def test_beams_count_as_sequences() -> None:
    """A search of three beams is more than two answers."""
    account = Account()
    search, answers, newcomer = Holding(account, 2, 6), Holding(account, 3, 3), Holding(account)
    assert search.excess > answers.excess
    assert yields(search, 3, False, newcomer, 1)
    assert yields(search, 3, True, Holding(account, 1, 1), 2)
    assert not yields(search, 3, True, Holding(account, 1, 1), 3), "the client would have less than the other one"


def test_what_was_taken_is_not_taken_back() -> None:
    """Whoever gives way has at least as much as the other one afterwards."""
    ahead, behind = Account(counter=5.0), Account(counter=1.0)
    assert yields(Holding(ahead, 5, 5), 1, True, Holding(behind, 3, 3), 1)
    assert not yields(Holding(ahead, 4, 4), 1, True, Holding(behind, 3, 3), 1)
    assert not yields(Holding(behind, 5, 5), 1, True, Holding(ahead, 3, 3), 1), "it used less so far"
    assert not yields(Holding(ahead, 5, 5), 1, False, Holding(behind, 3, 3), 1), "its turn is not over"
    assert not yields(Holding(ahead, 1, 1), 1, False, Holding(behind), 1)
    assert not yields(Holding(behind, 1, 1), 1, True, Holding(ahead), 1)


# --- rows


def test_a_long_prompt_leaves_rows_for_another_client() -> None:
    driver = Driver(slots(2), budget=16)
    driver.add(90, client=GREEDY)
    driver.step()
    small = driver.add(8, client=OTHER)
    assert counts(driver.step()) == {0: 8, small.seq_id: 8}
    assert small.num_output == 1
    assert counts(driver.step()) == {0: 15, small.seq_id: 1}, "the rest is for whoever needs it"


def test_running_texts_leave_rows_for_another_client_s_prompt() -> None:
    """A step of as many rows as sequences: a prompt gets half of them, not one."""
    driver = Driver(slots(8), max_num_seqs=8, budget=8)
    flood(driver, 8, num_prompt=1)
    driver.step()
    newcomer = driver.add(12, client=OTHER)
    assert driver.steps_until(lambda: newcomer.num_output > 0) == 3
    assert sum(request.metrics.num_preemptions for request in driver.requests) == 1


@given(
    needs=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    weights=st.lists(st.sampled_from((0.001, 0.5, 1.0, 3.0, 1000.0)), min_size=8, max_size=8),
    extra=st.integers(0, 200),
)
def test_rows_are_divided_without_loss(needs: list[int], weights: list[float], extra: int) -> None:
    """None gets more than it needs, each gets a row, and whoever gets less than it needs has no less than others."""
    names = [str(place) for place in range(len(needs))]
    rows, by_name = len(needs) + extra, dict(zip(names, weights, strict=False))
    parts = divide(rows, dict(zip(names, needs, strict=True)), by_name)
    assert all(1 <= parts[name] <= need for name, need in zip(names, needs, strict=True))
    assert sum(parts.values()) == min(rows, sum(needs))
    for short in (name for name, need in zip(names, needs, strict=True) if parts[name] < need):
        for other in names:
            ratio = by_name[other] / by_name[short]
            assert parts[other] <= len(needs) + ratio * (parts[short] + len(needs)), "more than by rounding"


# --- memory


def test_a_newcomer_gets_memory_that_one_client_holds() -> None:
    driver = Driver(blocks(10), max_num_seqs=8)
    flooding = flood(driver, 5, max_tokens=4, num_prompt=7)
    driver.step()
    assert driver.cache.free_tokens() == 0
    newcomer = driver.add(9, client=OTHER)
    schedule = driver.step()
    assert (schedule.admitted, schedule.preempted[:2]) == ([newcomer], [flooding[4], flooding[3]])
    assert newcomer.num_output == 1
    driver.finish()


def test_growing_texts_take_memory_from_the_client_with_most() -> None:
    """An older sequence of the client that has more gives way to a newer one of another client."""
    driver = Driver(blocks(8), max_num_seqs=4)
    flooding = flood(driver, 2, max_tokens=9, num_prompt=7)
    driver.step()
    newcomer = driver.add(7, max_tokens=9, client=OTHER)
    driver.steps_until(lambda: newcomer.finished)
    assert newcomer.metrics.num_preemptions == 0
    assert flooding[0].metrics.num_preemptions == 0
    assert flooding[1].metrics.num_preemptions == 1
    driver.finish()
    assert driver.cache.free_tokens() == 8 * BLOCK


def test_a_light_client_keeps_the_memory_that_it_took() -> None:
    """Its only text isn't preempted by the many of a heavy client, from which it took the memory for its prompt."""
    driver, light = Driver(blocks(40), max_num_seqs=12, budget=12), Client("light", 0.05)
    flood(driver, 12, max_tokens=30)
    driver.step()
    newcomer = driver.add(85, max_tokens=9, client=light)
    while not newcomer.finished:
        flood(
            driver,
            12 - sum(not each.finished for each in driver.requests if each.sender.client is GREEDY),
            max_tokens=30,
        )
        driver.step()
    assert newcomer.metrics.num_preemptions == 0


# --- counters


def test_absence_earns_nothing() -> None:
    """A client that comes back begins where the others are, and keeps what it has used above that."""
    accounts = Accounts(most_lead=1000)
    accounts.enter(GREEDY)
    accounts.enter(OTHER)
    accounts.charge({"greedy": 100, "other": 10})
    accounts.enter(THIRD)
    assert accounts.of(THIRD).counter == 10
    accounts.leave(GREEDY)
    accounts.enter(GREEDY)
    assert accounts.of(GREEDY).counter == 100, "leaving pays no debt"
    accounts.leave(GREEDY)
    accounts.charge({"other": 200, "third": 300})
    accounts.enter(GREEDY)
    assert accounts.of(GREEDY).counter == 210


def test_use_of_an_idle_engine_costs_a_bounded_wait() -> None:
    accounts = Accounts(most_lead=50)
    accounts.enter(GREEDY)
    accounts.charge({"greedy": 1000})
    accounts.enter(OTHER)
    assert accounts.of(OTHER).counter == accounts.of(GREEDY).counter
    accounts.charge({"greedy": 1000, "other": 1})
    assert (accounts.of(GREEDY).counter, accounts.of(OTHER).counter) == (51, 1)


def test_clients_are_forgotten() -> None:
    accounts = Accounts(most_lead=50)
    accounts.enter(OTHER)
    for number in range(100):
        client = Client(str(number))
        accounts.enter(client)
        accounts.charge({client.name: 7, "other": 1})
        accounts.leave(client)
    assert len(accounts._accounts) < 20
    accounts.leave(OTHER)
    assert accounts.few
    assert not accounts._accounts


def test_weight_divides_what_is_counted() -> None:
    accounts = Accounts(most_lead=50)
    accounts.enter(Client("heavy", 4.0))
    accounts.enter(OTHER)
    accounts.charge({"heavy": 20, "other": 20})
    assert (accounts.of(Client("heavy")).counter, accounts.of(OTHER).counter) == (5, 20)


# --- the queue


def test_a_full_queue_has_places_for_a_newcomer() -> None:
    driver = Driver(slots(2), max_num_seqs=2, max_waiting=8)
    flood(driver, 10)
    with pytest.raises(CapacityError, match="10 wait, 1 more came and max_num_seqs . max_waiting is 10"):
        driver.add(2, client=GREEDY)
    for _ in range(5):
        driver.add(2, client=OTHER)
    with pytest.raises(CapacityError):
        driver.add(2, client=OTHER)
    assert driver.scheduler.num_vacant(THIRD) == 3
    driver.finish()
    assert driver.scheduler.num_vacant(GREEDY) == 10


def test_places_are_divided_by_weight() -> None:
    assert [places_of(weight, 2.0, 12) for weight in (1.0, 2.0, 4.0, 0.001)] == [4, 6, 8, 1]
    assert places_of(1.0, 0.0, 12) == 12


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), 2000.0, True, "1"])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(RequestError, match="from 0.001 to 1000"):
        Client("a", weight)


# --- one client


def test_one_client_is_served_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its weight change nothing, nor do debts of clients that left."""

    def schedules(client: Client, debtor: Client | None) -> list[dict[int, int]]:
        driver = Driver(blocks(40), max_num_seqs=4, budget=9)
        driver.add(1, client=client)
        if debtor is not None:
            driver.scheduler._accounts.enter(debtor)
            driver.scheduler._accounts.charge({debtor.name: 150})
            driver.scheduler._accounts.leave(debtor)
        for place in range(12):
            driver.add(3 + 5 * place % 17, max_tokens=20, priority=place % 3, client=client)
        made = [counts(driver.step()) for _ in range(150)]
        driver.finish()
        return made

    usual = schedules(ANYONE, None)
    assert schedules(Client("a", 3.0), None) == usual
    assert schedules(Client("a", 0.1), OTHER) == usual
    monkeypatch.setattr(scheduler_module, "TURN", 1)
    assert schedules(ANYONE, OTHER) == usual
