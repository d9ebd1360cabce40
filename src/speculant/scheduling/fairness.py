"""Fair shares: clients are served in turn, each in proportion to its weight, whatever its requests ask for.

    shared                    who gets it
    a place to run            the client with the fewest running sequences; of equals, the one with the lowest counter
    the rows of a step        every client as many as it needs, or an equal part of the rest (max-min fairness)
    a place to wait           every client an equal part of all places
    the time of a step's work every client an equal part (scheduling/schedule.py)

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

The first token of a client that had nothing in the engine comes at most 3 steps after the steps that its prompt takes
at its share of the rows. This needs memory for a text of each client, and as many places as clients. Otherwise, beside
N sequences in all, the client gains a token at least once in 2 N (max_model_len + TURN) steps, times the ratio of the
weights.

A client's share is divided among its requests, whatever their n. Prompts of one call (`Client.call`) are one request.

    shared                    who gets it
    a place to run            of the most urgent requests the one with the fewest running sequences; of equals, the
                              first by the policy
    the rows of a step        a request with several running sequences, or beams, no more than its max-min part

A request without running sequences takes the place of the last sequence of the client's request that runs the most, if
that has more than one and is not more urgent (`priority`). Such a sequence also gives way first when memory is short.
So no request waits for the n sequences of another one. A request whose only running sequence ended queues again behind
those that came meanwhile: if a client has more requests than places, they take turns, a sequence each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from speculant.types import Client, Request

T = TypeVar("T")  # a client, or a request of one: each is counted separately

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
        found[request.client.name].append(request)
    return found


def surplus(own: Sequence[Request], priority: int, rank: Callable[[Request], tuple[int, ...]]) -> Request | None:
    """Return the last by rank of the running sequences of the request that has the most, if it has more than one.

    own: the running sequences of one client. priority: more urgent requests, whose priority is lower, give up nothing.
    """
    counts = Counter(request.call for request in own)
    several = [each for each in own if counts[each.call] > 1 and each.priority >= priority]
    return max(several, key=lambda each: (counts[each.call], *rank(each)), default=None)


def last_of(own: Sequence[Request], rank: Callable[[Request], tuple[int, ...]]) -> Request:
    """Return which of its running sequences a client gives up first: the last by rank, or before it a surplus one."""
    last = max(own, key=rank)
    return surplus(own, last.priority, rank) or last


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
