"""Prompts that are read ahead of the requests that may begin with them, in steps in which no request waits or runs.

    queue ---schedule---> a part in the cache ---settle---> full blocks in the prefix index, and nothing held
                            ^                      |
                            +--- within a block ---+        pause: a request comes, and the rest of a block is lost

Each block begins with the longest known prefix, as a request does. So a request finds every block free or known, and
waits for the part under way, which is one step. Nothing is preempted. A part takes up to STEP_S, as long as the work of
a step beside other clients (scheduling/scheduler.py). On a machine whose shortest step takes longer than half of that,
a part takes up to twice as long as the shortest step. So does the step of another request that has a draft.

Before a part, up to STEP_S are spent on reading the prefix from the disk. A part of a prefix is read in each of these
steps, and a preparation whose reading does not come further ends.

Clients take turns. A client has few preparations, and the oldest gives way to a new one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from speculant.cache import KVCache, PrefixNode, PreparedPrefixes, ReservationPlan
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.params import SamplingParams
from speculant.scheduling.scheduler import STEP_S, Schedule, Scheduled
from speculant.types import Request, Sender

PREPARED, LOOKED_UP = -999, -998  # the id of the one sequence that is being prepared; of one whose prefix is looked up
MOST_OF_CLIENT, MOST = 8, 64  # preparations that are queued, of one client and in all
MOST_STALLED = 8  # steps in which no further block is read from the disk
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def _promise() -> Future[int]:
    made = Future[int]()
    made.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
    return made


@dataclass(eq=False)
class Preparation:
    """A prompt to be read ahead. cached: how many of its tokens were known when it was queued.

    left: tokens of the blocks that may still be computed; more are missing if its blocks are evicted meanwhile. last:
    the block at which its last part ended. fetched: blocks that were known after a step of reading from the disk.
    stalled: such steps that brought no block. done: how many tokens are known in the end; they are full blocks.
    """

    request: Request
    cached: int
    left: int
    last: PrefixNode | None = None
    fetched: int = 0
    stalled: int = 0
    done: Future[int] = field(default_factory=_promise)

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.request.prompt)


class Preparations:
    """The queue. most_rows: of a pass. salt: see `Scheduler`. holds: `pause` is to be called before a request comes."""

    def __init__(self, cache: KVCache, most_rows: int, salt: Callable[[Request], str]) -> None:
        self._cache, self._salt, self.prefixes = cache, salt, PreparedPrefixes(cache)
        self._rows, self._most, self._least_s = 1, most_rows, math.inf  # of the next part; of a part; of the shortest
        self._queues: dict[str, deque[Preparation]] = {}  # by client, the next one first; none is empty
        self.holds = False  # blocks of a part that ended within one
        self._known = 0  # blocks of the part's prompt that were in the index before it

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, tokens: tuple[int, ...], sender: Sender) -> Preparation:
        """Queue a prompt, unless all of its full blocks are known."""
        metrics = RequestMetrics(TimingMetrics(arrival=0.0))
        text = [*tokens, tokens[-1]]  # the last one stands for what may follow, and is never computed
        request = Request(PREPARED, "prepared", 0, tokens, GREEDY, 0, metrics, sender, tokens=text)
        known = self._look_up(request)
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
            if self._fetch(first):
                plan = ReservationPlan(self._cache)
                item = self._part(first, plan)
                if item is not None:
                    return Schedule([item], plan, 0, [], [])
            elif first.stalled < MOST_STALLED:
                return None  # the next step reads more from the disk
            self._finish(first)
        return None

    def _fetch(self, preparation: Preparation) -> bool:
        """Read a preparation's prefix from the disk; return False if more of it is to be read."""
        tokens, salt = preparation.request.tokens, self._salt(preparation.request)
        if self._cache.fetch(tokens, salt, STEP_S):
            return True
        known = self._cache.known_blocks(tokens, salt)
        preparation.stalled = 0 if known > preparation.fetched else preparation.stalled + 1
        preparation.fetched = max(known, preparation.fetched)
        return False

    def settle(self, item: Scheduled, seconds: float) -> None:
        """End a part that was computed in this many seconds. A full block may be followed by one of another client."""
        self._least_s = min(self._least_s, seconds)
        most_s = max(STEP_S, 2 * self._least_s)
        if seconds > most_s:
            self._rows = max(1, int(item.count * most_s / seconds))
        elif 2 * seconds <= most_s:
            self._rows = min(max(self._rows, 2 * item.count), self._most)
        if (item.start + item.count) % self._cache.block_size == 0:
            self._end_block(item)

    def pause(self) -> None:
        """Hold nothing, because a request comes."""
        self._cache.release(PREPARED)
        self.holds = False

    def _end_block(self, item: Scheduled) -> None:
        client, size = item.request.sender.client.name, self._cache.block_size
        preparation = self._queues[client][0]
        self.prefixes.add(PREPARED, self._known, client)
        nodes, before = self._cache.prefix(PREPARED), preparation.last
        preparation.last = nodes[-1] if nodes else None
        preparation.left -= (item.start + item.count) // size * size - item.start // size * size
        self.pause()
        if before is not None:  # a request begins with the state at the end of the last part
            self._cache.forget_state(before)
        self._queues[client] = self._queues.pop(client)
        if preparation.left <= 0:
            self._finish(preparation)

    def fail(self, error: BaseException) -> None:
        """End the preparation whose part failed."""
        self.pause()
        own = next(iter(self._queues.values()))
        own[0].done.set_exception(error)
        self._leave(own[0])

    def drop(self) -> None:
        """End all preparations with what they have. Raise nothing, in whatever state a failed step left the cache."""
        for each in [each for own in self._queues.values() for each in own]:
            try:
                self._cache.release(LOOKED_UP)  # unless the step failed while it was held, nothing happens
                self._finish(each)
            except Exception as error:  # noqa: BLE001 - who waits for it gets it
                if not each.done.done():
                    each.done.set_exception(error)
        self._queues.clear()

    def _part(self, preparation: Preparation, plan: ReservationPlan) -> Scheduled | None:
        """Return the next part of a preparation; None if nothing is missing, or there is no memory for it.

        A part ends where a block ends, or within its first one.
        """
        request, size = preparation.request, self._cache.block_size
        start = self._cache.length(PREPARED)
        if not start % size:
            self.pause()
            start = self._match(PREPARED, request)
        end = min(start + self._rows, self._end(request), start // size * size + preparation.left)
        end = end // size * size if end // size > start // size else end
        begun = -(-start // size)  # blocks
        own = start % size > 0
        blocks = self.prefixes.make_room(-(-end // size) - begun + own, request.sender.client.name) - own
        end = min(end, (begun + blocks) * size)
        self._known = self._cache.known_blocks(request.prompt, self._salt(request))
        if end <= start or not plan.take(PREPARED, end - start):
            self.pause()
            return None
        if not end % size:
            self._cache.part_at(PREPARED, end)
        self.holds = True
        return Scheduled(request, start, end - start)

    def _match(self, seq_id: int, request: Request) -> int:
        """Let a sequence take over the longest known prefix; return its length."""
        return self._cache.match_prefix(seq_id, request.tokens, self._salt(request), self._end(request))

    def _look_up(self, request: Request) -> int:
        """Return the length of the longest known prefix."""
        known = self._match(LOOKED_UP, request)
        self._cache.release(LOOKED_UP)
        return known

    def _end(self, request: Request) -> int:
        """Return the end of the last full block of a prompt; with states, of one that the whole prompt goes beyond.

        A request with the same prompt computes its last token. It can begin within a block, but with a state only at
        the end of one.
        """
        size, length = self._cache.block_size, len(request.prompt) - (self._cache.records is not None)
        return length // size * size if self._cache.keeps_prefixes else 0

    def _finish(self, preparation: Preparation) -> None:
        """End a preparation with what is known of it now."""
        self.pause()
        known = self._match(LOOKED_UP, preparation.request)
        self._cache.mark_used(LOOKED_UP)
        self._cache.release(LOOKED_UP)
        preparation.done.set_result(known)
        self._leave(preparation)

    def _leave(self, preparation: Preparation) -> None:
        client = preparation.request.sender.client.name
        self._queues[client].remove(preparation)
        if not self._queues[client]:
            del self._queues[client]
