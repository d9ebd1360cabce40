"""A lane's threads serve clients in turn."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from types import SimpleNamespace

import pytest

from speculant.structured import ClientLane, LaneClosedError, LaneFullError, lanes

PATIENCE = 20.0


class Held:
    """A lane whose first call waits for `go`; `order` has the calls that have begun since."""

    def __init__(self, num_threads: int = 1, most: int | None = None) -> None:
        self.lane = ClientLane("test-lane", num_threads, most=most)
        self.go, self.order, self._done = threading.Event(), list[str](), threading.Semaphore(0)
        self.submitted = 0

    def submit(self, client: str, name: str) -> Future[None]:
        """Submit a call that notes its name."""
        future = self.lane.submit(client, partial(self._call, name))
        self.submitted += 1
        return future

    def hold(self, client: str) -> threading.Event:
        """Submit a call that waits for `go`, and return the event of its beginning."""
        begun = threading.Event()
        self.lane.submit(client, lambda: (begun.set(), self.go.wait(20)))
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
    """The next call is not forgotten: the other thread has looked at it before, and left it to the client's thread."""
    held, looked, done = Held(num_threads=2), threading.Event(), threading.Event()
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        assert held.go.wait(20)
        raise LookupError("no")

    failed = held.lane.submit("one", fail)
    assert begun.wait(20)
    held.lane.submit("one", done.set)
    held.lane.submit("other", looked.set)
    assert looked.wait(20)
    held.go.set()
    assert done.wait(5)
    assert isinstance(failed.exception(PATIENCE), LookupError)


def test_a_client_may_have_only_so_much_work() -> None:
    """What it has cancelled does not count, nor what has ended."""
    held = Held(most=3)
    assert held.hold("first").wait(PATIENCE)
    given = [held.submit("a", f"a{number}") for number in range(3)]
    with pytest.raises(LaneFullError):
        held.submit("a", "a3")
    held.submit("b", "b0")
    assert given[1].cancel()
    held.submit("a", "a4")
    held.submitted -= 1
    assert held.finish() == ["a0", "b0", "a2", "a4"]
    for name in "5678":
        held.submit("a", name).result(PATIENCE)


def test_cancelled_work_never_runs_and_is_forgotten() -> None:
    held = Held(most=100)
    begun = threading.Event()
    first = held.lane.submit("a", lambda: (begun.set(), held.go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    for _ in range(200):
        assert held.submit("a", "cancelled").cancel()
    assert not held.lane._queues
    assert not first.cancel(), "it has begun"
    held.submit("a", "kept")
    held.submitted = 1
    assert held.finish() == ["kept"]


def test_a_lane_rests_for_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a bound. Time passes here by the work alone."""
    now, rests = [0.0], list[float]()
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=rests.append))
    lane, other = ClientLane("test", longest_rest=0.25), ClientLane("test")

    def work(seconds: float) -> None:
        now[0] += seconds

    for each in (lane, other):
        for seconds in (0.125, 0.5):
            each.submit("a", partial(work, seconds)).result(PATIENCE)
        each.submit("a", partial(work, 0)).result(PATIENCE)
        each.close()
    assert rests[:2] == [0.125, 0.25]
    assert set(rests[2:]) <= {0.0}


def test_a_closed_lane_takes_no_more() -> None:
    """Work that has begun goes on, what waits is cancelled; it may never have had any."""
    for count in (0, 3):
        held = Held()
        assert not count or held.hold("one").wait(PATIENCE)
        waiting = [held.submit("one", str(number)) for number in range(count)]
        held.lane.close()
        with pytest.raises(LaneClosedError):
            held.submit("one", "late")
        for each in waiting:
            with pytest.raises(CancelledError):
                each.result(PATIENCE)
        held.submitted = 0
        assert held.finish() == []
