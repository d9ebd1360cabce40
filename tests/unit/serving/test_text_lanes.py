"""Work on the texts of one client does not delay that of others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from types import SimpleNamespace

import pytest

from speculant.serving import LARGE, ApiError, TextLane, TextLanes, text_lanes

PATIENCE = 30.0


class Busy:
    """A lane that is busy until `go`, and the order in which other work ran in it."""

    def __init__(self, most: int) -> None:
        self.lane, self.ran = TextLane("test", most), list[str]()
        self._go, begun = threading.Event(), threading.Event()
        self.first = self.lane.submit("first", self._work(begun))
        assert begun.wait(PATIENCE)

    def _work(self, begun: threading.Event) -> Callable[[], bool]:
        def work() -> bool:
            begun.set()
            return self._go.wait(PATIENCE)

        return work

    def add(self, client: str, name: str) -> Future[None]:
        return self.lane.submit(client, lambda: self.ran.append(name))

    def go(self) -> None:
        self._go.set()
        self.lane.submit("last", lambda: None).result(PATIENCE)


@pytest.fixture
def busy() -> Iterator[Busy]:
    made = Busy(3)
    yield made
    made.go()
    made.lane.close()


def test_clients_take_turns(busy: Busy) -> None:
    for client, name in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]:
        busy.add(client, name)
    busy.go()
    assert busy.ran == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_client_may_have_only_so_much_work(busy: Busy) -> None:
    held = [busy.add("a", f"a{i}") for i in range(3)]
    with pytest.raises(ApiError) as caught:
        busy.add("a", "a3")
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
    busy.add("b", "b0")
    assert held[1].cancel()
    busy.add("a", "a4")
    busy.go()
    assert busy.ran == ["a0", "b0", "a2", "a4"]
    for name in "567":
        busy.add("a", name).result(PATIENCE)


def test_a_client_may_have_as_many_small_texts_as_requests() -> None:
    """As many as wait in an engine by default: a burst of one client is served."""
    lanes, go = TextLanes(most_large=1), threading.Event()
    held = [lanes.submit("a", 1, lambda: go.wait(PATIENCE)) for _ in range(1024)]
    with pytest.raises(ApiError):
        lanes.submit("a", 1, lambda: None)
    go.set()
    assert all(each.result(PATIENCE) for each in held)
    lanes.close()


def test_cancelled_work_never_runs_and_is_forgotten(busy: Busy) -> None:
    for _ in range(100):
        assert busy.add("a", "a").cancel()
    assert not busy.lane._lane._queues
    assert not busy.first.cancel()
    busy.go()
    assert busy.ran == []
    assert busy.lane._held == {}


def test_errors_reach_the_caller(busy: Busy) -> None:
    def fail() -> None:
        raise LookupError("no")

    failing, after = busy.lane.submit("a", fail), busy.add("a", "after")
    busy.go()
    assert isinstance(failing.exception(PATIENCE), LookupError)
    assert after.result(PATIENCE) is None


def test_a_closed_lane_cancels_what_waits() -> None:
    busy = Busy(3)
    waiting = busy.add("a", "a")
    busy.lane.close()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    with pytest.raises(ApiError) as caught:
        busy.add("b", "b")
    assert caught.value.status == 503
    busy._go.set()
    assert busy.first.result(PATIENCE)


def test_a_lane_rests_for_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a bound. Time passes here by the work alone."""
    now, rests = [0.0], list[float]()
    monkeypatch.setattr(text_lanes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=rests.append))
    lane, other = TextLane("test", 9, longest_rest=0.25), TextLane("test", 9)

    def work(seconds: float) -> None:
        now[0] += seconds

    for each in (lane, other):
        for seconds in (0.125, 0.5):
            each.submit("a", partial(work, seconds)).result(PATIENCE)
        each.submit("a", partial(work, 0)).result(PATIENCE)
        each.close()
    assert rests[:2] == [0.125, 0.25]
    assert set(rests[2:]) <= {0.0}


def test_small_work_does_not_wait_for_large() -> None:
    lanes, go, begun = TextLanes(most_large=2), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(PATIENCE)

    large = lanes.submit("a", LARGE + 1, wait)
    assert begun.wait(PATIENCE)
    assert lanes.submit("a", LARGE, lambda: "small").result(PATIENCE) == "small"
    assert not large.done()
    lanes.submit("a", LARGE + 1, lambda: None)
    with pytest.raises(ApiError):
        lanes.submit("a", LARGE + 1, lambda: None)
    go.set()
    lanes.close()
