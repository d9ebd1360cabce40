"""The waiting requests: they agree with a sorted list, whatever is removed, added again, begun and ended."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from speculant.scheduling import WaitingQueue, WaitingRequests
from speculant.types import Client, Request
from tests.examples import examples
from tests.models import make_request

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "begin", "end", "unready"]), st.integers(0, 8), st.integers(0, 3)),
    max_size=60,
)


class Model:
    """Three requests of three sequences, the last one of another client, and what is expected of their queue.

    A sequence's key may change while it does not wait, and before `end` (see `WaitingRequests`).
    """

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self.waiting = WaitingRequests(self.key)
        clients = [Client("one"), Client("one"), Client("two")]
        self.requests = [
            make_request([1], seq_id=number, request_id=str(number // 3), client=clients[number // 3])
            for number in range(9)
        ]
        self.queued: set[int] = set()
        self.begun: set[str] = set()
        self.unready: set[int] = set()  # has an effect on sequences of begun requests alone

    def key(self, request: Request) -> tuple[int, int]:
        return self.keys[request.seq_id], request.seq_id

    def is_ready(self, request: Request) -> bool:
        return request.seq_id not in self.unready

    def act(self, action: str, number: int, key: int) -> None:
        request = self.requests[number]
        if action == "add" and request not in self.waiting:
            self.keys[number] = key
            self.waiting.add(request)
            self.queued.add(number)
        elif action in ("remove", "begin") and request in self.waiting:
            self.waiting.remove(request) if action == "remove" else self.waiting.begin(request)
            self.queued.remove(number)
            self.begun |= {request.request_id} if action == "begin" else set()
        elif action == "end" and request.request_id in self.begun:
            for each in self.waiting.siblings(request):
                self.keys[each.seq_id] = key
            self.waiting.end(request)
            self.begun.remove(request.request_id)
        elif action == "unready":
            self.unready ^= {number}

    def firsts(self) -> list[Request]:
        """Return the first ready sequence of each begun request, and of the first one of the others of each client."""
        found, firsts = list[Request](), dict[str, Request]()
        for start in (0, 3, 6):
            waiting = [each for each in self.requests[start : start + 3] if each.seq_id in self.queued]
            if waiting and waiting[0].request_id in self.begun:
                found += [each for each in waiting if each.seq_id not in self.unready][:1]
            elif waiting:
                name = waiting[0].sender.client.name
                firsts[name] = min(firsts.get(name, waiting[0]), waiting[0], key=self.key)
        return [*found, *firsts.values()]


@given(ACTIONS)
def test_waiting_requests_agree_with_a_sorted_list(actions: list[tuple[str, int, int]]) -> None:
    model = Model()
    for action in actions:
        model.act(*action)
        firsts = [*model.waiting.firsts_of_begun(model.is_ready), *model.waiting.firsts_of_others()]
        assert sorted(firsts, key=model.key) == sorted(model.firsts(), key=model.key)
        assert list(model.waiting) == sorted((model.requests[number] for number in model.queued), key=model.key)
        assert len(model.waiting) == len(model.queued)
        model.waiting.check()


def test_request_that_comes_back_has_its_new_place() -> None:
    """It was first, was admitted and is preempted: its former entry would make it first."""
    model = Model()
    model.act("add", 0, 0)
    model.act("add", 3, 1)
    model.act("begin", 0, 0)
    model.act("add", 0, 2)
    model.act("end", 0, 2)
    assert model.waiting.firsts_of_others() == [model.requests[3]]


def test_cancelled_requests_leave_no_entries() -> None:
    queue = WaitingQueue()
    queue.enter(("first",), (0,))
    for number in range(1, examples(10_000, least=1000)):
        queue.enter((str(number),), (number,))
        queue.leave((str(number),))
    assert queue.first() == ("first",)
    assert list(queue) == [("first",)]
    queue.check()
