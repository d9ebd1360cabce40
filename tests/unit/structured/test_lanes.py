"""A lane's threads serve clients in turn."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from speculant.structured import ClientLane


class Held:
    """A lane whose first call waits for `go`; `order` has the calls that have begun since."""

    def __init__(self, num_threads: int = 1) -> None:
        self.lane = ClientLane("test-lane", num_threads)
        self.go, self.order, self._done = threading.Event(), list[str](), threading.Semaphore(0)
        self.submitted = 0

    def submit(self, client: str, name: str) -> None:
        """Submit a call that notes its name."""
        self.submitted += 1
        self.lane.submit(client, partial(self._call, name))

    def hold(self, client: str) -> threading.Event:
        """Submit a call that waits for `go`, and return the event of its beginning."""
        begun = threading.Event()
        self.lane.submit(client, lambda: (begun.set(), self.go.wait(20)))  # type: ignore[arg-type, return-value]
        return begun

    def finish(self) -> list[str]:
        """Let calls begin, wait for all of them, and return their names in order."""
        self.go.set()
        for _ in range(self.submitted):
            assert self._done.acquire(timeout=20)
        return self.order

    def _call(self, name: str) -> None:
        self.order.append(name)
        self._done.release()


def test_clients_take_turns() -> None:
    """A client with a hundred calls does not delay the only call of another one by more than one."""
    held = Held()
    assert held.hold("greedy").wait(20)
    for number in range(100):
        held.submit("greedy", f"g{number}")
    held.submit("modest", "m0")
    held.submit("modest", "m1")
    held.submit("third", "t0")
    order = held.finish()
    assert order[:6] == ["g0", "m0", "t0", "g1", "m1", "g2"]
    assert order[6:] == [f"g{number}" for number in range(3, 100)]


def test_a_client_has_one_thread() -> None:
    held = Held(num_threads=2)
    assert held.hold("slow").wait(20)
    second = held.hold("slow")
    held.submit("other", "o0")
    assert held._done.acquire(timeout=20), "the second thread serves the other client"
    held._done.release()
    assert not second.is_set()
    assert held.finish() == ["o0"]
    assert second.wait(20)


def test_calls_of_nobody_have_all_threads() -> None:
    held = Held(num_threads=2)
    assert held.hold("").wait(20)
    assert held.hold("").wait(20)
    held.go.set()


def test_an_error_of_a_call_stops_no_lane() -> None:
    lane, done = ClientLane("test-lane", 1), threading.Event()
    lane.submit("one", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    lane.submit("one", done.set)
    assert done.wait(20)


def test_the_call_after_a_failed_one_is_not_forgotten() -> None:
    """The other thread has looked at it before, and left it to the thread of the client's first call."""
    held, looked, done = Held(num_threads=2), threading.Event(), threading.Event()
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        assert held.go.wait(20)
        raise LookupError("no")

    held.lane.submit("one", fail)
    assert begun.wait(20)
    held.lane.submit("one", done.set)
    held.lane.submit("other", looked.set)
    assert looked.wait(20)
    held.go.set()
    assert done.wait(5)


def test_a_withdrawn_call_never_runs() -> None:
    held = Held()
    assert held.hold("one").wait(20)
    call = partial(held.order.append, "withdrawn")
    held.lane.submit("one", call)
    held.submit("one", "kept")
    held.lane.withdraw("one", call)
    held.lane.withdraw("two", call)
    assert held.finish() == ["kept"]


def test_a_closed_lane_takes_no_more() -> None:
    """Its threads end after the calls that it has, even if it never had any."""
    for count in (0, 3):
        held = Held()
        for number in range(count):
            held.submit("one", str(number))
        held.lane.close()
        with pytest.raises(RuntimeError):
            held.submit("one", "late")
        held.submitted = count
        assert held.finish() == [str(number) for number in range(count)]
