"""The order in which sequences are served: of one client's by a policy, and a queue for each client of those that wait.

A policy is a sort key, of which the smallest comes first. A request's *level* is its priority plus one for every
PATIENCE steps that passed before it was queued. So no policy starves a request: it is served before every request that
came PATIENCE steps later with the same priority. Nothing that a key depends on changes while a request waits.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from speculant.cache import KVCache, Sources
from speculant.config import Limits
from speculant.scheduling.fairness import TURN, Accounts, Holding, by_client, last_of
from speculant.types import Request

PATIENCE = 64  # steps

Key = tuple[int, ...]


class Standing(NamedTuple):
    """The facts about a request that a policy may use.

    arrival: number of earlier requests. queued_at: number of steps before it was queued. held: positions in the cache.
    backlog: tokens that are not in the cache.
    """

    arrival: int
    priority: int
    queued_at: int
    held: int
    backlog: int

    @property
    def level(self) -> int:
        """Lower is served sooner."""
        return self.priority + self.queued_at // PATIENCE


def first_come(standing: Standing) -> Key:
    """Serve in order of arrival, prompts and decodes alike."""
    return standing.level, standing.arrival


def decode_first(standing: Standing) -> Key:
    """Serve sequences that lack only their newest token first, so that no prompt delays them; then by arrival.

    A prompt of one token counts as a prompt. Otherwise an endless series of such prompts would delay all others.
    """
    return int(standing.backlog > 1 or not standing.held), standing.level, standing.arrival


def shortest_prompt(standing: Standing) -> Key:
    """Serve the shortest backlog first."""
    return standing.level, standing.backlog, standing.arrival


Policy = Callable[[Standing], Key]
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"first-come": first_come, "decode-first": decode_first, "shortest-prompt": shortest_prompt}
)

Name = tuple[str, ...]  # of a request, see `Request.call`


class WaitingQueue:
    """Names in the order of their keys; of equal keys, the one that entered first comes first."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._order: list[tuple[Key, int, Name]] = []  # key, number of the entry, name
        self._entries: dict[Name, tuple[Key, int, Name]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Name]:
        return (name for _, _, name in self._order)

    def enter(self, name: Name, key: Key) -> None:
        """Queue a name; one that is queued gets a new key."""
        self.leave(name)
        entry = self._entries[name] = key, next(self._numbers), name
        insort(self._order, entry)

    def leave(self, name: Name) -> None:
        """Take a name out if it is queued."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def first(self) -> Name | None:
        """Return the name with the smallest key; None if there is none."""
        return self._order[0][2] if self._order else None

    def check(self) -> None:
        """Assert that each name has its entry, in order."""
        assert self._order == sorted(self._entries.values()), "a name has no entry, two, or another place"


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
        queued = sorted(name for queue in self._queues.values() for name in queue)
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


class Standings:
    """The running sequences, and where each sequence stands: who is served before whom, and who gives way first."""

    def __init__(self, limits: Limits, target: KVCache) -> None:
        self.target, self.sources, self.accounts = target, Sources(target), Accounts(limits.max_model_len + TURN)
        self.running: list[Request] = []
        self._policy = POLICIES[limits.scheduling_policy]
        self._arrivals = itertools.count()
        self._queued_at: dict[int, tuple[int, int]] = {}  # step and arrival

    def queue(self, request: Request, step: int) -> None:
        """Note that a sequence is queued, after all earlier ones."""
        self._queued_at[request.seq_id] = step, next(self._arrivals)

    def forget(self, request: Request) -> None:
        """Delete the record of a sequence that has ended."""
        del self._queued_at[request.seq_id]

    def turn(self, request: Request) -> Key:
        """Return the place of a sequence among those of its client."""
        return self._policy(self._standing(request))

    def place(self, request: Request) -> tuple[float, ...]:
        """Return the place of a running request in a step: after clients with a lower counter."""
        return self.accounts.of(request.client).counter, *self.turn(request)

    def rank(self, request: Request) -> tuple[int, int]:
        """Return the place of a sequence by level and arrival alone; the largest gives way first."""
        standing = self._standing(request)
        return standing.level, standing.arrival

    def last(self) -> Request:
        """Return the running request that is preempted first: of the client with the most, see `last_of`.

        A client's only request comes after those of clients with more. Otherwise one of little weight would take memory
        from such a client (`yields`), and lose it again as soon as texts grow.
        """
        if self.accounts.few:
            return last_of(self.running, self.rank)
        holdings, lasts = self.holdings(), [last_of(each, self.rank) for each in by_client(self.running).values()]

        def excess(request: Request) -> tuple[float, ...]:
            held = holdings[request.client.name]
            return held.num_requests > 1, held.per_weight(), *self.rank(request)

        return max(lasts, key=excess)

    def holdings(self) -> dict[str, Holding]:
        """Return the holdings of the clients with running requests."""
        holdings: dict[str, Holding] = {}
        for request in self.running:
            held = holdings.get(request.client.name) or Holding(self.accounts.of(request.client))
            holdings[request.client.name] = Holding(
                held.account, held.num_requests + 1, held.num_sequences + width(request)
            )
        return holdings

    def has_begun(self, request: Request) -> bool:
        """Whether a sequence of its request runs."""
        return any(other.call == request.call for other in self.running)

    def backlog(self, request: Request) -> int:
        """Return how many tokens of a request are not in the cache."""
        return len(request.tokens) - self.target.length(request.seq_id)

    def unencoded(self, request: Request) -> int:
        """Return how many tokens of a request's source are not encoded; a waiting request holds no source."""
        if not request.source:
            return 0
        source = self.sources.of(request.seq_id)
        return 0 if source is not None and self.sources.is_encoded(source) else len(request.source)

    def _standing(self, request: Request) -> Standing:
        held, (queued_at, arrival) = self.target.length(request.seq_id), self._queued_at[request.seq_id]
        backlog = len(request.tokens) - held + self.unencoded(request)
        return Standing(arrival, request.priority, queued_at, held, backlog)


def width(request: Request) -> int:
    """Return the number of sequences that a request counts as: a beam search has one for each beam."""
    return request.params.beam_width or 1
