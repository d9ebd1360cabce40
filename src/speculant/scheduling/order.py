"""The order in which sequences are served: a queue of waiting sequences for each client, which a policy sorts.

A policy is a sort key, of which the smallest comes first. A request's *level* is its priority plus one for every
PATIENCE steps that passed before it was queued. So no policy starves a request: it is served before every request that
came PATIENCE steps later with the same priority. Nothing that a key depends on changes while a request waits.

Shares are fair: clients are served in turn, each in proportion to its weight, whatever its requests ask for.

    shared                    who gets it
    a place to run            the client with the fewest running sequences; of equals, the one with the lowest counter
    the rows of a step        every client as many as it needs, or an equal part of the rest (max-min fairness)
    a place to wait           every client an equal part of all places
    the time of a step's work every client an equal part (scheduling/scheduler.py)

Numbers are divided by weights: four sequences of a client of weight 2 count as two.

A client's *counter* is the number of rows computed for it, divided by its weight: the virtual token counter of Sheng et
al. 2023 (arXiv 2401.00588). Prompt tokens, output tokens, hypotheses of a beam search and tokens that are computed
again after preemption count, because each takes a row that another client might use. Tokens found in the prefix cache
do not count, as they are not computed. The time of drafts and of other work beside the pass counts as the rows that
take as long.

A client that comes back starts at the lowest counter of the present clients, so an absent client gains no advantage. No
counter is more than a fixed lead above the lowest one, so a client that used an idle engine does not wait long later.

A client without running sequences takes the place of the last sequence of the client that runs the most, if that client
has more than one. If all clients have one, because there are more clients than places or little memory, they take turns
of at least TURN tokens. A client with fewer running sequences than another one takes further places by turns as well.
No client can take a place back at once, so sequences are not preempted in circles.

Let a new client's prompt take n steps at the client's share of the rows. Its first token comes after at most n + 3
steps, if there is memory for a text of each client and there are as many places as clients. Otherwise, beside N
sequences in all, the client gains a token at least once in 2 N (max_model_len + TURN) steps, times the ratio of the
weights.

A client's share is divided among its requests, whatever their n. Prompts of one call (`Client.call`) are one request.

    shared                    who gets it
    a place to run            of the most urgent requests the one with the fewest running sequences; of equals, the
                              first by the policy
    the rows of a step        a request with several running sequences, or beams, no more than its max-min part

Among a client's requests, the request with the most running sequences gives its last place to a request that has none,
unless it has only one or is more urgent (`priority`). Its last sequence also gives way first when memory is short. So
no request waits for the n sequences of another one. A request whose only running sequence ended queues again after
requests that came meanwhile: if a client has more requests than places, they take turns, a sequence each.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from speculant.cache import KVCache, Sources
from speculant.config import Limits
from speculant.types import Client, Request

T = TypeVar("T")  # a client, or a request of one: each is counted separately

CALL = attrgetter("call")
TURN = 64  # tokens; computing a text of some hundred tokens again takes the time of a few of them


@dataclass(slots=True)
class Account:
    """One client's weight, its counter, and the number of its sequences that wait or run."""

    weight: float = 1.0
    counter: float = 0.0
    num_sequences: int = 0


class Accounts:
    """The accounts of the clients that have sequences, and of those whose counter is still above the lowest."""

    def __init__(self, most_lead: int) -> None:
        """most_lead: a counter is at most this far above the lowest one."""
        self._most_lead = most_lead
        self._accounts: dict[str, Account] = {}
        self.few = True  # there are fewer than two clients, so that nothing has to be shared

    def of(self, client: Client) -> Account:
        """Return the account of a client that has sequences."""
        return self._accounts[client.name]

    def enter(self, client: Client) -> None:
        """Count a new sequence of a client."""
        account, lowest = self._accounts.setdefault(client.name, Account()), self._lowest()
        if not account.num_sequences:
            account.counter = max(account.counter, lowest)
        account.weight = client.weight
        account.num_sequences += 1
        self.few = len(self._accounts) < 2

    def leave(self, client: Client) -> None:
        """Count a sequence less; the client is forgotten once its counter does not matter."""
        self._accounts[client.name].num_sequences -= 1
        self._forget()

    def charge(self, rows: Mapping[str, float]) -> None:
        """Add the rows of a step to the counters, by client."""
        if self.few:
            return
        for name, count in rows.items():
            account = self._accounts[name]
            account.counter += count / account.weight
        most = self._lowest() + self._most_lead
        for account in self._accounts.values():
            account.counter = min(account.counter, most)
        self._forget()

    def vacant_places(self, client: Client, most: int) -> int:
        """Return how many more sequences a client may have.

        This client and all clients that have sequences share `most` places by weight, and have at least one each.
        """
        present = {name: each for name, each in self._accounts.items() if each.num_sequences}
        own = present.pop(client.name, Account())
        others = sum(account.weight for account in present.values())
        return places_of(client.weight, others, most) - own.num_sequences

    def _lowest(self) -> float:
        return min((each.counter for each in self._accounts.values() if each.num_sequences), default=0.0)

    def _forget(self) -> None:
        """Forget absent clients whose counter would be raised if they came back."""
        lowest, present = self._lowest(), any(each.num_sequences for each in self._accounts.values())
        for name, account in list(self._accounts.items()):
            if not account.num_sequences and (account.counter <= lowest or not present):
                del self._accounts[name]
        self.few = len(self._accounts) < 2


def places_of(weight: float, others: float, most: int) -> int:
    """Return a client's part of `most` places, at least one. others: the sum of the other clients' weights."""
    return max(1, int(most * weight / (weight + others)))


def divide(rows: int, needs: Mapping[T, int], weights: Mapping[T, float]) -> dict[T, int]:
    """Divide rows among clients: one row for each, and of the rest as many as it needs, or an equal part by weight.

    There are at least as many rows as clients, and each needs one at least. The last of equals gets the remainder.
    """
    parts: dict[T, int] = {}
    left, total = max(0, rows - len(needs)), sum(weights[name] for name in needs)
    for name in sorted(needs, key=lambda name: (needs[name] - 1) / weights[name]):
        is_last = len(parts) == len(needs) - 1
        more = min(needs[name] - 1, left if is_last else int(left * weights[name] / total))
        parts[name] = 1 + more
        left, total = left - more, total - weights[name]
    return parts


def by_client(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Return the requests of each client."""
    found = defaultdict[str, list[Request]](list)
    for request in requests:
        found[request.sender.client.name].append(request)
    return found


def surplus(own: Sequence[Request], priority: int, rank: Callable[[Request], tuple[int, ...]]) -> Request | None:
    """Return the last by rank of the running sequences of the request that has the most, if it has more than one.

    own: the running sequences of one client. priority: more urgent requests, whose priority is lower, give up nothing.
    """
    counts = Counter(map(CALL, own))
    several = [each for each in own if counts[each.call] > 1 and each.sender.priority >= priority]
    return max(several, key=lambda each: (counts[each.call], *rank(each)), default=None)


def last_of(own: Sequence[Request], rank: Callable[[Request], tuple[int, ...]]) -> Request:
    """Return which of its running sequences a client gives up first: the last by rank, or before it a surplus one."""
    last = max(own, key=rank)
    return surplus(own, last.sender.priority, rank) or last


class Holding(NamedTuple):
    """The running requests of a client, and its running sequences: each beam of a search counts as a sequence."""

    account: Account
    num_requests: int = 0
    num_sequences: int = 0

    def per_weight(self, change: int = 0) -> float:
        """Return the number of sequences by weight, after a change."""
        return (self.num_sequences + change) / self.account.weight

    @property
    def excess(self) -> tuple[bool, float, float]:
        """Orders clients by how much they have; the largest gives way first."""
        return self.num_requests > 1, self.per_weight(), self.account.counter


def yields(holder: Holding, last: int, had_turn: bool, claimant: Holding, wanted: int) -> bool:
    """Whether a client gives up its last running request for a waiting one of another client.

    last, wanted: the sequences of these requests. had_turn: the last one got at least TURN tokens since it began to run
    """
    if not claimant.num_requests:
        return holder.num_requests > 1 or (had_turn and holder.account.counter > claimant.account.counter)
    behind = claimant.account.counter <= holder.account.counter
    return had_turn and behind and holder.num_requests > 1 and holder.per_weight(-last) >= claimant.per_weight(wanted)


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
    """Names in the order of their keys; names with equal keys are in the order in which they entered."""

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
        name, client, waiting = request.call, request.sender.client.name, self.siblings(request)
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
        """Return the place of a sequence among its client's sequences."""
        return self._policy(self._standing(request))

    def place(self, request: Request) -> tuple[float, ...]:
        """Return the place of a running request in a step: after clients with a lower counter."""
        return self.accounts.of(request.sender.client).counter, *self.turn(request)

    def rank(self, request: Request) -> tuple[int, int]:
        """Return the place of a sequence by level and arrival alone; the largest gives way first."""
        standing = self._standing(request)
        return standing.level, standing.arrival

    def last(self) -> Request:
        """Return the running request that is preempted first: of the client with the most, see `last_of`.

        A client with a single request comes after all clients with more. Otherwise a client of little weight would take
        memory from a client with several requests (`yields`), and lose it again as soon as texts grow.
        """
        if self.accounts.few:
            return last_of(self.running, self.rank)
        holdings, lasts = self.holdings(), [last_of(each, self.rank) for each in by_client(self.running).values()]

        def excess(request: Request) -> tuple[float, ...]:
            held = holdings[request.sender.client.name]
            return held.num_requests > 1, held.per_weight(), *self.rank(request)

        return max(lasts, key=excess)

    def holdings(self) -> dict[str, Holding]:
        """Return the holdings of the clients with running requests."""
        holdings: dict[str, Holding] = {}
        for request in self.running:
            held = holdings.get(request.sender.client.name) or Holding(self.accounts.of(request.sender.client))
            holdings[request.sender.client.name] = Holding(
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
        backlog = len(request.tokens) - held
        if request.source:
            backlog += self.unencoded(request)
        return Standing(arrival, request.sender.priority, queued_at, held, backlog)


def width(request: Request) -> int:
    """Return the number of sequences that a request counts as: a beam search has one for each beam."""
    return request.params.beam_width or 1
