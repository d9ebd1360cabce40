"""The waiting queue: it agrees with a sorted list, whatever is removed, added again and held back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from speculant.scheduling.waiting import WaitingQueue
from speculant.types import Request
from tests.examples import examples
from tests.models import make_request

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "hold", "readmit"]), st.integers(0, 5), st.integers(0, 3)), max_size=60
)


class Model:
    """A queue whose keys are set before each `add`, and its expected content: requests in order of key and entry."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self.queue = WaitingQueue(lambda request: (self.keys[request.seq_id],))
        self.requests = [make_request([1], seq_id=number) for number in range(6)]
        self.order: list[Request] = []  # those that can be the first, in the order in which they were entered
        self.held: list[Request] = []

    def enter(self, request: Request) -> None:
        self.order.append(request)
        self.order.sort(key=lambda each: self.keys[each.seq_id])  # stable: equal keys in the order of entry

    def act(self, action: str, number: int, key: int) -> None:
        request = self.requests[number]
        if action == "add" and request not in self.queue:
            self.keys[number] = key
            self.queue.add(request)
            self.enter(request)
        elif action == "remove" and request in self.queue:
            self.queue.remove(request)
            (self.order if request in self.order else self.held).remove(request)
        elif action == "hold" and request in self.order:
            self.queue.hold_back(request)
            self.order.remove(request)
            self.held.append(request)
        elif action == "readmit":
            self.queue.readmit(lambda each: each.seq_id >= number)
            for each in [each for each in self.held if each.seq_id >= number]:
                self.held.remove(each)
                self.enter(each)


@given(ACTIONS)
def test_queue_agrees_with_a_sorted_list(actions: list[tuple[str, int, int]]) -> None:
    model = Model()
    for action in actions:
        model.act(*action)
        assert model.queue.first() is (model.order[0] if model.order else None)
        assert len(model.queue) == len(model.order) + len(model.held)
        model.queue.check()


def test_request_that_comes_back_has_its_new_place() -> None:
    """It was first, was admitted and is preempted: its former entry would make it first."""
    model = Model()
    model.act("add", 0, 0)
    model.act("add", 1, 1)
    model.act("remove", 0, 0)
    model.act("add", 0, 2)
    assert model.queue.first() is model.requests[1]


def test_cancelled_requests_leave_no_entries() -> None:
    queue = WaitingQueue(lambda request: (request.seq_id,))
    first = make_request([1], seq_id=0)
    queue.add(first)
    for number in range(1, examples(10_000, least=1000)):
        request = make_request([1], seq_id=number)
        queue.add(request)
        queue.remove(request)
    assert queue.first() is first
    assert len(queue._heap) <= 2
