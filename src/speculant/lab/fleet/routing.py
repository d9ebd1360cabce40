"""Which replica a request goes to.

    random           any replica
    least            the replica with the fewest requests (that wait or run), of all
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


class Members:
    """The replicas that a router may choose, and their loads as it knows them. Every operation takes constant time."""

    def __init__(self) -> None:
        self.all = list[int]()
        self._places = dict[int, int]()
        self.loads = dict[int, int]()
        self._levels = dict[int, dict[int, None]]()  # replicas by load

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def add(self, number: int, load: int) -> None:
        """Add a replica."""
        self._places[number] = len(self.all)
        self.all.append(number)
        self.loads[number] = load
        self._levels.setdefault(load, {})[number] = None

    def remove(self, number: int) -> None:
        """Remove a replica; the last one takes its place."""
        place, last = self._places.pop(number), self.all.pop()
        if last != number:
            self.all[place], self._places[last] = last, place
        self._leave(number, self.loads.pop(number))

    def update(self, number: int, load: int) -> None:
        """Set a replica's load."""
        if (before := self.loads[number]) != load:
            self._leave(number, before)
            self.loads[number] = load
            self._levels.setdefault(load, {})[number] = None

    def _leave(self, number: int, load: int) -> None:
        del self._levels[load][number]
        if not self._levels[load]:
            del self._levels[load]

    def least(self) -> int:
        """Return the replica with the lowest load; of equals, the one that has had it longest."""
        return next(iter(self._levels[min(self._levels)]))

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
        self._holders = dict[str | int, Members]()
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
        holders = self._holders.setdefault(prefix, Members())
        if number not in holders:
            holders.add(number, 0)
            self._held.setdefault(number, set()).add(prefix)
            self.entries += 1
            self.updates += 1
            self.most_entries = max(self.most_entries, self.entries)

    def random(self, arrival: Arrival) -> int:
        """Any replica."""
        return self._rng.choice(self.members.all)

    def least(self, arrival: Arrival) -> int:
        """The least loaded of all."""
        return self.members.least()

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
