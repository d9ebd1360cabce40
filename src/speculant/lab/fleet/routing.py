"""Which replica a request goes to.

    random           any replica
    least            a replica with the fewest requests (that wait or run), of all
    two              the one with fewer requests, of two random ones
    prefix           of the replicas that got a request with this prefix before, the one with the fewest requests; as
                     `two` if there is none, or if loads are imbalanced: the most and the fewest requests of a replica
                     differ by more than a threshold (the rule of Ray's PrefixCacheAffinityRouter)
    prefix-bounded   the same, but only the chosen replica's load counts: it may have at most `threshold` requests more
                     than that of `two`, which otherwise gets the request, and from then on has the prefix too

Loads may be old: a router that hears of them every few seconds sees the numbers of the last report. A router does not
hear of evictions, so it may take a replica to have a prefix that it has lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from speculant.lab.fleet.traffic import Arrival

MATCHED = 0.1  # of a prompt: a shorter shared prefix is ignored, as in Ray
SAMPLED = 16  # replicas with a prefix that are compared


class Numbers:
    """A set of numbers, of which a random one is chosen in constant time."""

    def __init__(self) -> None:
        self.all = list[int]()
        self._places = dict[int, int]()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        self._places[number] = len(self.all)
        self.all.append(number)

    def remove(self, number: int) -> None:
        """Remove a number; the last one takes its place."""
        place, last = self._places.pop(number), self.all.pop()
        if last != number:
            self.all[place], self._places[last] = last, place


class Members(Numbers):
    """The replicas that a router may choose, and their loads as it knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = dict[int, int]()
        self._levels = dict[int, Numbers]()  # replicas by load

    def add(self, number: int, load: int = 0) -> None:
        """Add a replica."""
        super().add(number)
        self._enter(number, load)

    def remove(self, number: int) -> None:
        """Remove a replica."""
        super().remove(number)
        self._leave(number, self.loads.pop(number))

    def update(self, number: int, load: int) -> None:
        """Set a replica's load."""
        if (before := self.loads[number]) != load:
            self._leave(number, before)
            self._enter(number, load)

    def _enter(self, number: int, load: int) -> None:
        self.loads[number] = load
        if load not in self._levels:
            self._levels[load] = Numbers()
        self._levels[load].add(number)

    def _leave(self, number: int, load: int) -> None:
        self._levels[load].remove(number)
        if not self._levels[load].all:
            del self._levels[load]

    def least(self) -> list[int]:
        """Return the replicas with the lowest load."""
        return self._levels[min(self._levels)].all

    def imbalance(self) -> int:
        """Return the difference of the highest and the lowest load."""
        return max(self._levels) - min(self._levels)


class Router:
    """Chooses replicas. holders: the replicas that were sent each prefix; updates: how often that changed."""

    def __init__(self, routing: str, threshold: float, rng: random.Random) -> None:
        self.members = Members()
        self.keeps_prefixes = routing.startswith("prefix")
        self.entries = self.most_entries = self.updates = 0
        self._choose: Callable[[Arrival], int] = getattr(self, routing.replace("-", "_"))
        self._threshold, self._rng = threshold, rng
        self._holders = dict[str | int, Numbers]()
        self._held = dict[int, set[str | int]]()

    def choose(self, arrival: Arrival) -> int | None:
        """Return a replica; None if there is none."""
        if not self.members.all:
            return None
        chosen = self._choose(arrival)
        if self.keeps_prefixes and arrival.prefix is not None:
            self._note(arrival.prefix, chosen)
        return chosen

    def forget(self, number: int) -> None:
        """Remove a replica, and the prefixes that it has got."""
        self.members.remove(number)
        for prefix in self._held.pop(number, ()):
            self._holders[prefix].remove(number)
            self.entries -= 1
            self.updates += 1

    def _note(self, prefix: str | int, number: int) -> None:
        holders = self._holders.setdefault(prefix, Numbers())
        if number not in holders:
            holders.add(number)
            self._held.setdefault(number, set()).add(prefix)
            self.entries += 1
            self.updates += 1
            self.most_entries = max(self.most_entries, self.entries)

    def random(self, arrival: Arrival) -> int:
        """Any replica."""
        return self._rng.choice(self.members.all)

    def least(self, arrival: Arrival) -> int:
        """One of the least loaded of all."""
        return self._rng.choice(self.members.least())

    def two(self, arrival: Arrival) -> int:
        """The less loaded of two random ones."""
        loads = self.members.loads
        first, second = self._rng.choice(self.members.all), self._rng.choice(self.members.all)
        return second if loads[second] < loads[first] else first

    def prefix(self, arrival: Arrival) -> int:
        """The least loaded of those with the prefix, while all loads are balanced."""
        holder = self._holder(arrival)
        balanced = holder is not None and self.members.imbalance() <= self._threshold
        return holder if holder is not None and balanced else self.two(arrival)

    def prefix_bounded(self, arrival: Arrival) -> int:
        """The least loaded of those with the prefix, if its load is not far above that of the other choice."""
        other, holder, loads = self.two(arrival), self._holder(arrival), self.members.loads
        near = holder is not None and loads[holder] <= loads[other] + self._threshold
        return holder if holder is not None and near else other

    def _holder(self, arrival: Arrival) -> int | None:
        """Return the least loaded replica with a request's prefix; of many, some are compared."""
        holders = None if arrival.prefix is None else self._holders.get(arrival.prefix)
        if holders is None or not holders.all or arrival.shared < MATCHED * arrival.prompt:
            return None
        every, loads = holders.all, self.members.loads
        return min(every if len(every) <= SAMPLED else self._rng.sample(every, SAMPLED), key=loads.__getitem__)
