"""The waiting requests, in the order of their keys."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from speculant.scheduling.policy import Key
from speculant.types import Request


class WaitingQueue:
    """A heap of requests; adding, removing and taking the first are O(log n).

    key: orders the requests; it must not change while a request waits. A request that is held back stays in the queue
    and can't be the first until `readmit`.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int]] = []  # sequence ids; those of removed requests stay until they reach the top
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
        heapq.heappush(self._heap, (self._key(request), request.seq_id))

    def remove(self, request: Request) -> None:
        """Take a request out; raises KeyError if it does not wait."""
        del self._requests[request.seq_id]
        self._held_back.pop(request.seq_id, None)

    def first(self) -> Request | None:
        """Return the first request that is not held back; None if there is none."""
        while self._heap:
            request = self._requests.get(self._heap[0][1])
            if request is not None and request.seq_id not in self._held_back:
                return request
            heapq.heappop(self._heap)
        return None

    def hold_back(self, request: Request) -> None:
        """Skip a request until it is readmitted."""
        self._held_back[request.seq_id] = request

    def readmit(self, is_ready: Callable[[Request], bool]) -> None:
        """Return the held-back requests that are ready to their places in the queue."""
        for request in [each for each in self._held_back.values() if is_ready(each)]:
            del self._held_back[request.seq_id]
            self.add(request)
