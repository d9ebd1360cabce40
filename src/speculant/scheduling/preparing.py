"""Prompts that are read ahead of the requests that may begin with them, in steps in which no request waits or runs.

    queue ---schedule---> one part in the cache ---settle---> its blocks in the prefix index, and nothing held
      ^                                                            |
      +------------------------- not at its end -------------------+

A part is a whole number of blocks. Between parts a preparation holds nothing: the next part begins with the longest
known prefix, as a request does. So a request finds every block free or known, and waits for one part at most, which is
the step under way. Nothing is preempted. A part takes up to STEP_S, the time of one step's work for a newcomer
(scheduling/scheduler.py), or the time of one block if that is longer.

Clients take turns. A client has few preparations, and the oldest gives way to a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from speculant.cache import KVCache, PrefixNode, PreparedPrefixes, ReservationPlan
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.params import SamplingParams
from speculant.scheduling.scheduler import STEP_S, Schedule, Scheduled
from speculant.types import Request, Sender

PREPARED = -999  # the id of the one sequence that is being prepared
MOST_OF_CLIENT, MOST = 8, 64  # preparations that are queued, of one client and in all
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def _promise() -> Future[int]:
    made = Future[int]()
    made.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
    return made


@dataclass(eq=False)
class Preparation:
    """A prompt to be read ahead. cached: how many of its tokens were known when it was queued.

    left: the most tokens that may still be computed; more are missing if its blocks are evicted meanwhile. last: the
    block at which its last part ended. done: how many tokens are known in the end; the rest of the last block is never
    among them.
    """

    request: Request
    cached: int
    left: int
    last: PrefixNode | None = None
    done: Future[int] = field(default_factory=_promise)

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.request.prompt)


class Preparations:
    """The queue. most_rows: of a pass. salt: see `Scheduler`."""

    def __init__(self, cache: KVCache, most_rows: int, salt: Callable[[Request], str]) -> None:
        self._cache, self._salt, self.prefixes = cache, salt, PreparedPrefixes(cache)
        self._most = most_rows // cache.block_size  # blocks of a part
        self._blocks = 1  # of the next part
        self._queues: dict[str, deque[Preparation]] = {}  # by client, the next one first; none is empty
        self._known = 0  # blocks of the part's prompt that were in the index before it

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, tokens: tuple[int, ...], sender: Sender) -> Preparation:
        """Queue a prompt, unless all of its full blocks are known."""
        metrics = RequestMetrics(TimingMetrics(arrival=0.0))
        text = [*tokens, tokens[-1]]  # the last one stands for what may follow, and is never computed
        request = Request(PREPARED, "prepared", 0, tokens, GREEDY, 0, metrics, sender, tokens=text)
        known = self._start(request)
        self._cache.release(PREPARED)
        made = Preparation(request, known, self._end(request) - known)
        if made.left <= 0:
            made.done.set_result(known)
            return made
        own = self._queues.setdefault(sender.client.name, deque())
        own.append(made)
        if len(own) > MOST_OF_CLIENT or len(self) > MOST:
            self._finish(own[0] if len(own) > MOST_OF_CLIENT else next(iter(self._queues.values()))[0])
        return made

    def schedule(self) -> Schedule | None:
        """Return the next part of a preparation; None = there is none now. Its blocks are held until `settle`."""
        while self._queues:
            first = next(iter(self._queues.values()))[0]
            if not self._cache.fetch(first.request.tokens, self._salt(first.request), STEP_S):
                return None  # the next step reads more from the disk
            plan = ReservationPlan(self._cache)
            item = self._part(first, plan)
            if item is not None:
                return Schedule([item], plan, 0, [], [])
            self._finish(first)
        return None

    def settle(self, item: Scheduled, seconds: float) -> None:
        """End a part that was computed in this many seconds. The next one is of another client, if there is one."""
        own, size = next(iter(self._queues.values())), self._cache.block_size
        preparation, client = own[0], item.request.sender.client.name
        self.prefixes.add(PREPARED, self._known, client)
        nodes, before = self._cache.prefix(PREPARED), preparation.last
        preparation.last, preparation.left = nodes[-1] if nodes else None, preparation.left - item.count
        self._cache.release(PREPARED)
        if before is not None:  # a request begins with the state at the end of the last part
            self._cache.forget_state(before)
        most = max(1, int(item.count // size * STEP_S / max(seconds, 1e-9)))
        if most < self._blocks or item.count == self._blocks * size:
            self._blocks = max(1, min(most, 2 * self._blocks, self._most))
        self._queues[client] = self._queues.pop(client)
        if preparation.left <= 0:
            self._finish(preparation)

    def fail(self, error: BaseException) -> None:
        """End the preparation whose part failed."""
        self._cache.release(PREPARED)
        own = next(iter(self._queues.values()))
        own[0].done.set_exception(error)
        self._leave(own[0])

    def drop(self) -> None:
        """End all preparations with what they have."""
        while self._queues:
            self._finish(next(iter(self._queues.values()))[0])

    def _part(self, preparation: Preparation, plan: ReservationPlan) -> Scheduled | None:
        """Start a preparation and return its next part; None if nothing is missing, or there is no memory for it."""
        request, size = preparation.request, self._cache.block_size
        start = self._start(request)
        wanted = min(self._blocks, self._most, preparation.left // size, (self._end(request) - start) // size)
        count = self.prefixes.make_room(wanted, request.sender.client.name) * size if wanted > 0 else 0
        self._known = self._cache.known_blocks(request.prompt, self._salt(request))
        if not count or not plan.take(PREPARED, count):
            self._cache.release(PREPARED)
            return None
        self._cache.part_at(PREPARED, start + count)
        return Scheduled(request, start, count)

    def _start(self, request: Request) -> int:
        """Take over the longest known prefix; return its length."""
        return self._cache.match_prefix(PREPARED, request.tokens, self._salt(request), self._end(request))

    def _end(self, request: Request) -> int:
        """Return the end of the last full block of a prompt; with states, of one that the whole prompt goes beyond.

        A request with the same prompt computes its last token. It can begin within a block, but with a state only at
        the end of one.
        """
        size, length = self._cache.block_size, len(request.prompt) - (self._cache.records is not None)
        return length // size * size if self._cache.keeps_prefixes else 0

    def _finish(self, preparation: Preparation) -> None:
        """End a preparation with what is known of it now."""
        known = self._start(preparation.request)
        self._cache.mark_used(PREPARED)
        self._cache.release(PREPARED)
        preparation.done.set_result(known)
        self._leave(preparation)

    def _leave(self, preparation: Preparation) -> None:
        client = preparation.request.sender.client.name
        self._queues[client].remove(preparation)
        if not self._queues[client]:
            del self._queues[client]
