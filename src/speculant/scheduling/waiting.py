"""The requests that wait to run: a queue for each client."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from speculant.scheduling.policy import Key
from speculant.types import Request

Name = tuple[str, ...]  # of a request, see `Request.call`


class WaitingQueue:
    """A heap of names by their keys; entering, leaving and reading the first are O(log n) on average.

    The entry of a name that leaves stays in the heap. Each entry has a number of its own. Only an entry whose number is
    in `_entries` is valid, because a name that left and entered again may have another key. The heap is rebuilt when
    most of its entries are invalid, so its size is proportional to the number of names.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._heap: list[tuple[Key, int, Name]] = []  # key, number of the entry, name
        self._entries: dict[Name, int] = {}  # by name: the number of the valid entry

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, name: Name, key: Key) -> None:
        """Queue a name; one that is queued gets a new key."""
        number = self._entries[name] = next(self._numbers)
        heapq.heappush(self._heap, (key, number, name))
        self._tidy()

    def leave(self, name: Name) -> None:
        """Take a name out if it is queued."""
        if self._entries.pop(name, None) is not None:
            self._tidy()

    def first(self) -> Name | None:
        """Return the name with the smallest key, of equals the one that entered first; None if there is none."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def check(self) -> None:
        """Assert that each name has one valid entry, and that few entries are not valid."""
        valid = [entry[2] for entry in self._heap if self._is_valid(entry)]
        assert sorted(valid) == sorted(self._entries), "a name has no entry, or two"
        assert len(self._heap) <= 2 * len(self._entries), "the heap keeps entries of names that left it"

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def _is_valid(self, entry: tuple[Key, int, Name]) -> bool:
        _, number, name = entry
        return self._entries.get(name) == number


class WaitingRequests:
    """The waiting sequences of all clients, by request.

    A request of which a sequence runs has *begun*. A client's other requests are in a queue, each with the key of its
    first waiting sequence. key: it must not change while a sequence waits, except before `end`.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._sequences: dict[Name, list[Request]] = {}  # by request, in order; no list is empty
        self._queues: dict[str, WaitingQueue] = {}  # by client; none is empty
        self._begun: set[Name] = set()

    def __len__(self) -> int:
        return sum(map(len, self._sequences.values()))

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(itertools.chain(*self._sequences.values()), key=self._key))

    def __contains__(self, request: Request) -> bool:
        return request in self.siblings(request)

    def siblings(self, request: Request) -> list[Request]:
        """Return the waiting sequences of a sequence's request, in their order."""
        return self._sequences.get(request.call, [])

    def add(self, request: Request) -> None:
        """Queue a sequence."""
        insort(self._sequences.setdefault(request.call, []), request, key=attrgetter("seq_id"))
        self._arrange(request)

    def remove(self, request: Request) -> None:
        """Take a sequence out; raises KeyError if it does not wait."""
        if request not in self:
            raise KeyError(request.seq_id)
        self.siblings(request).remove(request)
        self._arrange(request)

    def begin(self, request: Request) -> None:
        """Take a sequence out because it runs."""
        self._begun.add(request.call)
        self.remove(request)

    def end(self, request: Request) -> None:
        """Queue the request of a sequence again, because none of its sequences runs."""
        self._begun.discard(request.call)
        self._arrange(request)

    def firsts_of_begun(self, is_ready: Callable[[Request], bool]) -> list[Request]:
        """Return the first ready sequence of each request that has begun."""
        found = (next(filter(is_ready, self._sequences.get(name, ())), None) for name in self._begun)
        return [request for request in found if request is not None]

    def firsts_of_others(self) -> list[Request]:
        """Return the first sequence of the first request in each client's queue."""
        names = (queue.first() for queue in self._queues.values())
        return [self._sequences[name][0] for name in names if name is not None]

    def check(self) -> None:
        """Assert that each request that waits as a whole is in a queue, and no other one."""
        for queue in self._queues.values():
            queue.check()
        queued = sorted(name for queue in self._queues.values() for name in queue._entries)
        assert queued == sorted(self._sequences.keys() - self._begun), "a request that has begun is queued, or another"

    def _arrange(self, request: Request) -> None:
        """Give the request of a sequence its place in its client's queue, or none if it has begun or does not wait."""
        name, client, waiting = request.call, request.client.name, self.siblings(request)
        queue = self._queues.setdefault(client, WaitingQueue())
        if waiting and name not in self._begun:
            queue.enter(name, self._key(waiting[0]))
        else:
            queue.leave(name)
        if not waiting:
            self._sequences.pop(name, None)
        if not queue:
            del self._queues[client]
