"""Stored responses belong to their owners, expire, and stay within their bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from speculant.serving.openai.responses import page_of
from speculant.serving.openai.store import (
    PER_ITEM,
    PER_RESPONSE,
    SHARE,
    ResponseStore,
    StoredItem,
    StoredResponse,
    Turn,
)


class Clock:
    """A time that tests set, and the calls that are planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.planned: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> Clock:
        self.planned.append((self.now + seconds, call))
        return self

    def cancel(self) -> None:
        """See `Timer`."""

    def move(self, to: float) -> None:
        self.now = to
        due = [call for time, call in self.planned if time <= to]
        self.planned = [each for each in self.planned if each[0] > to]
        for call in due:
            call()


def a_store(most: int = 10**6, ttl: float = 60.0) -> tuple[ResponseStore, Clock]:
    clock = Clock()
    return ResponseStore(most, ttl, lambda: clock.now, clock.later), clock


def items(*names: str, size: int = 10) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(name, b"x" * size) for name in names)


def add(
    store: ResponseStore, name: str, owner: str = "a", size: int = 100, previous: Turn | None = None
) -> StoredResponse:
    turn = Turn(items(f"{name}-in"), items(f"{name}-out"), previous)
    response = StoredResponse(name, owner, "completed", b"x" * size, turn)
    store.add(response)
    store.check()
    return response


def test_a_response_does_not_exist_for_others() -> None:
    store, _ = a_store()
    add(store, "r1", "a")
    assert store.find("b", "r1") is None is store.find("a", "r2")
    assert store.find("a", "r1") is not None
    assert store.find_item("b", "r1-out") is None
    assert store.find_item("a", "r1-out") == StoredItem("r1-out", b"x" * 10)


def test_bytes_are_those_of_the_texts_and_a_part_for_each() -> None:
    store, _ = a_store()
    add(store, "r1", size=100)
    assert store.total == store.used("a") == 100 + PER_RESPONSE + 2 * (PER_ITEM + 10) + len("r1-inr1-out")


def test_a_response_ends_with_its_time_and_without_a_request() -> None:
    store, clock = a_store(ttl=60)
    add(store, "r1")
    clock.move(30)
    add(store, "r2")
    clock.move(59.9)
    assert store.find("a", "r1") is not None
    clock.move(60)
    assert (len(store), store.find("a", "r1")) == (1, None)
    clock.move(90)
    assert (len(store), store.total, clock.planned) == (0, 0, [])
    add(store, "r3")
    clock.move(150)
    assert len(store) == 0
    store.check()


def test_a_time_that_is_over_counts_before_the_timer() -> None:
    store, clock = a_store(ttl=60)
    add(store, "r1")
    clock.now = 60
    assert store.find("a", "r1") is None is store.find_item("a", "r1-in")


def test_the_greediest_client_loses_its_oldest_response() -> None:
    store, _ = a_store(most=40_000)
    for number in range(5):
        add(store, f"a{number}", "a", size=200)
    small = store.used("a")
    for number in range(40):
        add(store, f"b{number}", "b", size=500)
        assert store.used("b") <= 40_000 // SHARE
    assert store.used("a") == small, "another's responses cost a client nothing"
    assert store.find("b", "b0") is None
    assert store.find("b", "b39") is not None


def test_many_clients_share_the_bytes() -> None:
    store, _ = a_store(most=100_000)
    for turn in range(20):
        for owner in range(25):
            add(store, f"{owner}-{turn}", f"client {owner}", size=500)
        add(store, f"greedy-{turn}", "greedy", size=20_000)
    assert store.total <= 100_000
    used = [store.used(f"client {owner}") for owner in range(25)]
    assert min(used) > 0
    assert max(used) - min(used) < 3000, "as equal as whole responses can be"


def test_a_response_beyond_the_bounds_is_not_kept() -> None:
    store, _ = a_store(most=40_000)
    before = add(store, "r1")
    add(store, "r2", size=20_000)
    assert store.find("a", "r2") is None
    assert store.find("a", "r1") is before, "it has not made room in vain"
    long = Turn(items("i1", "i2", size=5_000), (), before.turn)
    assert not store.add(StoredResponse("r3", "a", "completed", b"", long)), "its conversation counts"


def test_a_response_holds_the_bytes_that_its_task_needs() -> None:
    store, _ = a_store(most=40_000)
    running = [StoredResponse(f"r{n}", "a", "queued", b"", Turn(()), needed=5000) for n in range(3)]
    for response in running:
        store.add(response)
        store.check()
    assert [store.find("a", each.id) for each in running] == [None, None, running[2]]
    store.update(running[2], "in_progress", b"", needed=5000)
    assert store.total == 5000 + PER_RESPONSE
    store.update(running[2], "completed", b"")
    store.check()
    assert store.total == PER_RESPONSE


def test_a_turn_counts_once_however_many_continue_it() -> None:
    store, _ = a_store()
    first = add(store, "r1")
    alone = store.total
    second, third = (add(store, name, previous=first.turn) for name in ("r2", "r3"))
    assert store.total == 3 * alone
    assert [item.id for item in third.turn.before()] == ["r1-in", "r1-out"]
    assert third.turn.length == 4
    store.remove(first)
    store.check()
    assert store.find("a", "r1") is None
    assert [item.id for item in second.turn.items()] == ["r1-in", "r1-out", "r2-in", "r2-out"]
    assert store.find_item("a", "r1-out") is not None, "a stored response has it"
    store.remove(second)
    store.remove(third)
    store.remove(third)
    store.check()
    assert store.total == 0
    assert store.find_item("a", "r1-out") is None


def test_an_update_replaces_document_and_turn() -> None:
    store, _ = a_store()
    response = add(store, "r1")
    store.update(response, "completed", b"y" * 300, Turn(response.turn.inputs, items("new")))
    store.check()
    assert store.find_item("a", "r1-in") is not None is not store.find_item("a", "new")
    assert store.find_item("a", "r1-out") is None
    store.remove(response)
    store.update(response, "completed", b"z")
    store.check()
    assert (len(store), store.total, response.document) == (0, 0, b"z")


def test_an_item_that_was_sent_again_outlives_the_first() -> None:
    store, _ = a_store()
    first = add(store, "r1")
    store.add(StoredResponse("r2", "a", "completed", b"", Turn((StoredItem("r1-out", b"again"),))))
    assert store.find_item("a", "r1-out") == StoredItem("r1-out", b"x" * 10)
    store.remove(first)
    store.check()
    assert store.find_item("a", "r1-out") == StoredItem("r1-out", b"again")


def test_a_page_of_items_copies_no_item() -> None:
    """Clients that read nothing of it would hold a copy each."""
    listed = items("one", "two", "three", size=0)
    listed = tuple(item._replace(data=json.dumps({"id": item.id}).encode()) for item in listed)
    parts = page_of(listed, 2)
    assert all(any(part is item.data for part in parts) for item in listed[:2])
    assert json.loads(b"".join(parts)) == {
        "object": "list", "data": [{"id": "one"}, {"id": "two"}], "first_id": "one", "last_id": "two", "has_more": True,
    }  # fmt: skip
    assert json.loads(b"".join(page_of((), 5)))["data"] == []


def test_a_long_chain_is_released_without_recursion() -> None:
    store, _ = a_store(most=10**9)
    previous = None
    for number in range(20_000):
        response = StoredResponse(str(number), "a", "completed", b"", Turn(items(f"i{number}"), (), previous))
        store.add(response)
        previous = response.turn
        if number:
            store.remove(store.find("a", str(number - 1)))  # type: ignore[arg-type]
    assert store.total == PER_RESPONSE + sum(len(f"i{number}") + 10 + PER_ITEM for number in range(20_000))
    store.remove(response)
    assert store.total == 0
    del response, previous


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 3 else []) for seed in range(20)])
def test_bounds_and_bytes_hold_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    store, clock = a_store(most=60_000, ttl=100)
    known: list[StoredResponse] = []
    for number in range(300):
        owner = chance.choice("abcde")
        own = [each for each in known if each.owner == owner and store.find(owner, each.id) is each]
        what = chance.random()
        if what < 0.6:
            previous = chance.choice(own).turn if own and chance.random() < 0.7 else None
            known.append(add(store, f"r{number}", owner, chance.choice([10, 1000, 9000, 30_000]), previous))
        elif what < 0.8 and known:
            store.remove(chance.choice(known))
        elif what < 0.9 and known:
            store.update(chance.choice(known), "completed", b"x" * chance.choice([10, 5000, 20_000]))
        else:
            clock.move(clock.now + chance.random() * 40)
        store.check()
        assert store.total <= store.most
        assert all(store.used(each) <= store.most // SHARE for each in "abcde")
    clock.move(clock.now + 100)
    assert (len(store), store.total) == (0, 0)
