"""The requests that wait to run: a queue for each client."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from speculant.scheduling.policy import Key
from speculant.types import Request


class WaitingQueue:
    """A heap of requests; adding, removing and taking the first are O(log n) on average.

    key: orders the requests; it must not change while a request waits. A request that is held back stays in the queue
    and can't be the first until `readmit`.

    The entry of a request that leaves stays in the heap. Each entry has a number of its own. Only an entry whose number
    is in `_entries` is valid, because a request that was removed and added again may have another key. The heap is
    rebuilt when most of its entries are invalid, so its size is proportional to the number of waiting requests.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._numbers = itertools.count()
        self._heap: list[tuple[Key, int, int]] = []  # key, number of the entry, sequence id
        self._entries: dict[int, int] = {}  # by sequence id: the number of the valid entry
        self._requests: dict[int, Request] = {}
        self._held_back: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=self._key))

    def __contains__(self, request: Request) -> bool:
        return request.seq_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.seq_id] = request
        self._enter(request)

    def remove(self, request: Request) -> None:
        """Take a request out; raises KeyError if it does not wait."""
        del self._requests[request.seq_id]
        if self._held_back.pop(request.seq_id, None) is None:
            self._leave(request)

    def first(self) -> Request | None:
        """Return the first request that is not held back; None if there is none."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][2]] if self._heap else None

    def hold_back(self, request: Request) -> None:
        """Skip a request until it is readmitted."""
        self._held_back[request.seq_id] = request
        self._leave(request)

    def readmit(self, is_ready: Callable[[Request], bool]) -> None:
        """Return the held-back requests that are ready to their places in the queue."""
        for request in [each for each in self._held_back.values() if is_ready(each)]:
            del self._held_back[request.seq_id]
            self._enter(request)

    def check(self) -> None:
        """Assert that each request that can be the first has one valid entry, and that few entries are not valid."""
        valid = [entry[2] for entry in self._heap if self._is_valid(entry)]
        assert sorted([*valid, *self._held_back]) == sorted(self._requests), "a waiting request has no entry, or two"
        assert len(self._heap) <= 2 * len(self._entries), "the heap keeps entries of requests that left it"

    def _enter(self, request: Request) -> None:
        number = self._entries[request.seq_id] = next(self._numbers)
        heapq.heappush(self._heap, (self._key(request), number, request.seq_id))

    def _leave(self, request: Request) -> None:
        """Make a request's entry invalid."""
        del self._entries[request.seq_id]
        if len(self._heap) > 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def _is_valid(self, entry: tuple[Key, int, int]) -> bool:
        _, number, seq_id = entry
        return self._entries.get(seq_id) == number


class WaitingRequests:
    """The waiting requests of all clients. key: orders those of one client, see `WaitingQueue`."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._queues: dict[str, WaitingQueue] = {}  # by client; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(itertools.chain(*self._queues.values()), key=self._key))

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.client.name)
        return queue is not None and request in queue

    def add(self, request: Request) -> None:
        """Queue a request."""
        name = request.client.name
        if name not in self._queues:
            self._queues[name] = WaitingQueue(self._key)
        self._queues[name].add(request)

    def remove(self, request: Request) -> None:
        """Take a request out; raises KeyError if it does not wait."""
        name = request.client.name
        self._queues[name].remove(request)
        if not self._queues[name]:
            del self._queues[name]

    def first_of_each(self) -> list[Request]:
        """Return the first request of each client that has one which is not held back."""
        firsts = [queue.first() for queue in self._queues.values()]
        return [request for request in firsts if request is not None]

    def hold_back(self, request: Request) -> None:
        """Skip a request until it is readmitted."""
        self._queues[request.client.name].hold_back(request)

    def readmit(self, is_ready: Callable[[Request], bool]) -> None:
        """Return the held-back requests that are ready to their places in the queues."""
        for queue in self._queues.values():
            queue.readmit(is_ready)
