"""One replica: the loop of an engine, in simulated time.

    add ---> waiting ---admit---> reading ---prompt computed---> decoding ---answer complete---> done
                                  (rows of its prompt)           (one row, and its draft)

As in the engine (scheduling/scheduler.py), decoding sequences come first in a step, prompts share the other rows in the
order of arrival, and drafts get the rows that are left. A prompt's last row gives the first token. Unlike the engine, a
replica admits a request only when its whole answer fits into memory, so it never preempts one.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from speculant.errors import ConfigError
from speculant.lab.fleet.config import LONGEST, ReplicaLimits
from speculant.lab.fleet.traffic import Arrival
from speculant.lab.theory import VerificationCurve, expected_tokens, survival

if TYPE_CHECKING:
    from simpy import Environment, Event


@dataclass(frozen=True)
class EngineCosts:
    """The measured costs of one engine.

    seconds: of a target pass by its rows. rates: acceptance by depth. cost_ratio: c, a draft token's time over that of
    a target pass with as many rows as sequences. draft_overhead: the fixed time of a draft over a pass of one row.
    step_s: of each step beside the passes. sequence_s: of each sequence of a step after the first. admit_s: of a step
    for each request that it admits, such as the server's work on the engine's core. request_s: of each request where
    it delays no other. spread: standard deviation of the first rate between requests.
    prompt_share: rows that a row of a prompt counts as. It is less than a verified one, which has logits and a verdict.
    """

    seconds: VerificationCurve
    rates: tuple[float, ...] = (0.0,)
    cost_ratio: float = 0.0
    draft_overhead: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    admit_s: float = 0.0
    request_s: float = 0.0
    spread: float = 0.0
    prompt_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(f"alpha={list(self.rates)} is not between 0 and 1", "use for example --alpha 0.8.")
        for name in ("cost_ratio", "draft_overhead", "step_s", "sequence_s", "admit_s", "request_s", "prompt_share"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not a number of 0 or more", f"set {name} to 0.")
        mean = self.rates[0]
        if self.spread and not 0 <= self.spread**2 < mean * (1 - mean):
            raise ConfigError(
                f"alpha varies by {self.spread} around {mean}, which no distribution between 0 and 1 does",
                "use for example --alpha-spread 0.1, or 0.",
            )


class StepTable:
    """Times of steps, computed once for all replicas of a fleet. `reached[k]`: the first k tokens are accepted."""

    def __init__(self, costs: EngineCosts, limits: ReplicaLimits) -> None:
        most = limits.max_num_batched_tokens
        rows = np.arange(math.ceil(most * max(1.0, costs.prompt_share)) + 1).clip(min=1)
        first_s = costs.seconds.costs[0]
        self.costs, self.most_rows = costs, most
        self.reached: list[float] = survival(costs.rates, LONGEST).tolist()
        self._pass_s: list[float] = (costs.seconds.relative(rows) * first_s).tolist()
        self._expected: list[float] = expected_tokens(survival(costs.rates, LONGEST)).tolist()
        self._draft_s, self._fixed = costs.draft_overhead * first_s, limits.fixed_length
        self._chosen = dict[tuple[int, int], int]()

    def step_s(
        self, rows: int, prompt_rows: int, sequences: int, drafting: int = 0, length: int = 0, unread: int = 0
    ) -> float:
        """Return the seconds of a step.

        rows: of the target's pass, beside prompt_rows. drafting: sequences with drafts of that length. unread: prompt
        tokens that the drafter reads before.
        """
        costs = self.costs
        seconds = self._pass_s[rows + round(prompt_rows * costs.prompt_share)]
        seconds += costs.step_s + costs.sequence_s * (sequences - 1)
        if length:
            seconds += self._draft_s + length * costs.cost_ratio * self._pass_s[drafting]
        while unread > 0:
            seconds += costs.cost_ratio * self._pass_s[round(min(unread, self.most_rows) * costs.prompt_share)]
            unread -= self.most_rows
        return seconds

    def length(self, decoding: int, prompt_rows: int, reading: int) -> int:
        """Return the draft length of a step that decodes some sequences, and reads rows of some prompts.

        Drafts use leftover rows. Of all lengths that fit, the one with the most expected tokens per second is chosen.
        """
        if not decoding:
            return 0
        most = min(LONGEST, (self.most_rows - prompt_rows) // decoding - 1)
        if self._fixed is not None:
            return min(self._fixed, most)
        key = decoding, prompt_rows
        if key not in self._chosen:
            sequences = decoding + reading

            def rate(length: int) -> float:
                seconds = self.step_s(decoding * (length + 1), prompt_rows, sequences, decoding, length)
                return (decoding * self._expected[length] + reading) / seconds

            self._chosen[key] = max(range(most + 1), key=rate)
        return self._chosen[key]


Key = str | int


class PrefixStore:
    """Counts the blocks of a replica's KV cache: those of running requests, and computed ones that are kept for later.

    A known prefix has been computed; it is pinned while a running request uses it, and kept or evicted as a whole. The
    other blocks of an ended request serve nobody here, but they take room until they are the oldest, as in the engine.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._own = 0  # of running requests, beside pinned prefixes
        self._pins = dict[Key, int]()
        self._sizes = dict[Key, int]()  # of the pinned prefixes
        self._pinned = 0
        self._idle = OrderedDict[tuple[Key | None, int], int]()  # oldest first; None = of no shared prefix
        self._idle_blocks = 0
        self._ended = 0

    def knows(self, prefix: Key | None) -> bool:
        """Whether a prefix has been computed, and is not evicted."""
        return prefix is not None and (prefix in self._pins or (prefix, 0) in self._idle)

    def fits(self, own: int, prefix: Key | None) -> bool:
        """Whether a request fits, with its own blocks and a known prefix."""
        unpinned = 0 if prefix is None else self._idle.get((prefix, 0), 0)
        return self._own + self._pinned + unpinned + own <= self.capacity

    def take(self, own: int) -> None:
        """Give a request blocks of its own, and evict the oldest kept ones where they are needed."""
        self._own += own
        while self._own + self._pinned + self._idle_blocks > self.capacity:
            _, size = self._idle.popitem(last=False)
            self._idle_blocks -= size

    def give_back(self, own: int) -> None:
        """Take back blocks that a request has not used, as a known prefix replaces them."""
        self._own -= own

    def pin(self, prefix: Key, size: int) -> None:
        """Hold a known prefix for a request."""
        if prefix not in self._pins:
            self._idle_blocks -= self._idle.pop((prefix, 0), 0)
            self._sizes[prefix] = size
            self._pinned += size
        self._pins[prefix] = self._pins.get(prefix, 0) + 1

    def publish(self, prefix: Key, size: int) -> None:
        """Hold a prefix that a request has computed in blocks of its own; a known one replaces these blocks."""
        self._own -= size
        self.pin(prefix, size)

    def release(self, own: int, prefix: Key | None) -> None:
        """Take back the blocks of an ended request, and keep them as the newest; prefix: the one it holds."""
        self._own -= own
        self._ended += 1
        self._keep((None, self._ended), own)
        if prefix is not None:
            self._pins[prefix] -= 1
            if not self._pins[prefix]:
                del self._pins[prefix]
                size = self._sizes.pop(prefix)
                self._pinned -= size
                self._keep((prefix, 0), size)

    def _keep(self, key: tuple[Key | None, int], size: int) -> None:
        if size:
            self._idle[key] = size
            self._idle_blocks += size

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        assert self._idle_blocks == sum(self._idle.values()), "idle blocks"
        assert self._pinned == sum(self._sizes.values()), "pinned blocks"
        assert self._own >= 0, "blocks of requests"
        assert self._own + self._pinned + self._idle_blocks <= self.capacity, "capacity"


@dataclass(slots=True, eq=False)
class FleetRequest:
    """A request and what became of it. Times are in seconds; None = not yet, or never.

    replica: where it is. tries: how often it was sent. reused: prompt tokens found in a cache. steps, drafted: of
    decoding. exponent: the request accepts a token where the mean request's probability, to this power, allows it.
    """

    arrival: Arrival
    replica: Replica | None = None
    tries: int = 0
    first_s: float | None = None
    end_s: float | None = None
    error: str | None = None
    reused: int = 0
    steps: int = 0
    drafted: int = 0
    exponent: float = 1.0


@dataclass(slots=True, eq=False)
class Running:
    """A request's state in a replica. unread: prompt tokens without keys and values. left: tokens of the answer.

    own: blocks. prefix_blocks: of its shared prefix. holds: whether it holds the prefix in the store.
    """

    request: FleetRequest
    unread: int
    left: int
    own: int
    prefix_blocks: int
    holds: bool = False
    started: bool = False
    taken: int = 0  # rows of its prompt in this step
    draft: int = 0  # tokens of its draft in this step


class Replica:
    """An engine. `notify(request)` is called when a request is answered; `load` counts those that wait or run."""

    def __init__(
        self,
        number: int,
        env: Environment,
        table: StepTable,
        limits: ReplicaLimits,
        rng: random.Random,
        notify: Callable[[FleetRequest], None],
    ) -> None:
        self.number, self.busy_s = number, 0.0
        self._env, self._table, self._limits, self._rng, self._notify = env, table, limits, rng, notify
        self._store = PrefixStore(limits.kv_tokens // limits.block_size)
        self._waiting = deque[FleetRequest]()
        self._reading, self._decoding = list[Running](), list[Running]()
        self._step: Event | None = None
        self._ends_s = 0.0

    @property
    def load(self) -> int:
        """The requests that wait or run."""
        return len(self._waiting) + len(self._reading) + len(self._decoding)

    def can_hold(self, arrival: Arrival) -> bool:
        """Whether the cache has room for a request and its answer."""
        return self._blocks(arrival.prompt + arrival.answer) <= self._store.capacity

    def add(self, request: FleetRequest) -> None:
        """Queue a request; the next step begins at once if the replica is idle."""
        self._waiting.append(request)
        if self._step is None:
            self._begin()

    def remove(self, request: FleetRequest) -> None:
        """Drop a request that its client has given up; rows of the current step are computed all the same."""
        if request in self._waiting:
            self._waiting.remove(request)
        for group in (self._reading, self._decoding):
            for each in [each for each in group if each.request is request]:
                group.remove(each)
                self._release(each)

    def stop(self) -> list[FleetRequest]:
        """Fail: return all requests, and forget everything, the cached prefixes included."""
        if self._step is not None:
            self.busy_s -= self._ends_s - self._env.now
        lost = [*(each.request for each in (*self._decoding, *self._reading)), *self._waiting]
        self._waiting.clear()
        self._reading, self._decoding, self._step = [], [], None
        self._store = PrefixStore(self._store.capacity)
        return lost

    def _begin(self) -> None:
        """Begin a step, if there is work."""
        admitted = self._admit() if self._waiting else 0
        if not self._reading and not self._decoding:
            self._step = None
            return
        decoding = len(self._decoding)
        prompt_rows, reading = self._take_rows(self._limits.max_num_batched_tokens - decoding)
        length = self._table.length(decoding, prompt_rows, reading) if decoding else 0
        rows, drafting, longest = decoding, 0, 0
        unread = 0  # prompt tokens that a drafter reads, as it drafts for the first time
        for each in self._decoding if length else ():
            each.draft = draft = min(length, each.left - 1)
            if draft:
                rows, drafting, longest = rows + draft, drafting + 1, max(longest, draft)
                if not each.request.drafted:
                    unread += each.request.arrival.prompt - each.request.reused
        seconds = self._table.step_s(rows, prompt_rows, decoding + reading, drafting, longest, unread)
        seconds += admitted * self._table.costs.admit_s
        self.busy_s += seconds
        self._ends_s = self._env.now + seconds
        self._step = self._env.timeout(seconds)
        self._step.callbacks.append(self._end)

    def _admit(self) -> int:
        """Start waiting requests, while there are places and memory; return their number."""
        before = len(self._reading)
        most = self._limits.max_num_seqs - len(self._reading) - len(self._decoding)
        while self._waiting and most > 0:
            request = self._waiting[0]
            arrival = request.arrival
            prefix_blocks = self._prefix_blocks(arrival)
            known = prefix_blocks > 0 and self._store.knows(arrival.prefix)
            own = self._blocks(arrival.prompt + arrival.answer) - (prefix_blocks if known else 0)
            if not self._store.fits(own, arrival.prefix if known else None):
                break
            running = Running(request, arrival.prompt, arrival.answer, own, prefix_blocks)
            if known:
                self._reuse(running)
            self._store.take(own)
            self._waiting.popleft()
            self._reading.append(running)
            most -= 1
        return len(self._reading) - before

    def _reuse(self, running: Running) -> None:
        """Give a request a known prefix; at least one token is left to compute."""
        arrival = running.request.arrival
        assert arrival.prefix is not None, "a request without a prefix"
        self._store.pin(arrival.prefix, running.prefix_blocks)
        reused = min(running.prefix_blocks * self._limits.block_size, arrival.prompt - 1)
        running.unread, running.request.reused, running.holds = arrival.prompt - reused, reused, True

    def _take_rows(self, budget: int) -> tuple[int, int]:
        """Share rows among prompts, in order; return how many they take, and the number of these prompts.

        Others may have computed the prefix of one that has not started.
        """
        spare, reading = budget, 0
        for each in self._reading:
            if not each.started and not each.holds and each.prefix_blocks:
                prefix = each.request.arrival.prefix
                if prefix is not None and self._store.knows(prefix):
                    self._share(each)
            each.taken = min(each.unread, spare)
            each.started = each.started or each.taken > 0
            spare -= each.taken
            reading += each.taken > 0
        return budget - spare, reading

    def _share(self, each: Running) -> None:
        each.own -= each.prefix_blocks
        self._store.give_back(each.prefix_blocks)
        self._reuse(each)

    def _end(self, event: Event) -> None:
        """End a step: commit its tokens, and begin the next one."""
        if event is not self._step:  # the replica failed meanwhile
            return
        now, done = self._env.now, list[Running]()
        reached, random_number = self._table.reached, self._rng.random
        for each in self._decoding:
            request, accepted = each.request, 0
            if each.draft:
                draw = random_number() ** request.exponent
                while accepted < each.draft and draw < reached[accepted + 1]:
                    accepted += 1
                request.drafted += each.draft
                each.draft = 0
            request.steps += 1
            each.left -= 1 + accepted
            if not each.left:
                done.append(each)
        if self._reading:
            self._end_rows(now, done)
        for each in done:
            self._decoding.remove(each)
            self._release(each)
            each.request.end_s = now
            self._notify(each.request)
        if event is self._step:
            self._begin()

    def _end_rows(self, now: float, done: list[Running]) -> None:
        """Commit rows of prompts; a complete prompt gives the first token."""
        complete = list[Running]()
        for each in self._reading:
            each.unread -= each.taken
            each.taken = 0
            arrival = each.request.arrival
            if each.prefix_blocks and not each.holds and arrival.prompt - each.unread >= arrival.shared:
                assert arrival.prefix is not None, "a request without a prefix"
                each.own -= each.prefix_blocks
                self._store.publish(arrival.prefix, each.prefix_blocks)
                each.holds = True
            if not each.unread:
                complete.append(each)
        for each in complete:
            self._reading.remove(each)
            self._decoding.append(each)
            each.request.first_s = now
            each.left -= 1
            if not each.left:
                done.append(each)

    def _release(self, each: Running) -> None:
        self._store.release(each.own, each.request.arrival.prefix if each.holds else None)

    def _blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self._limits.block_size)

    def _prefix_blocks(self, arrival: Arrival) -> int:
        known = arrival.prefix is not None and self._limits.prefix_caching
        return arrival.shared // self._limits.block_size if known else 0

    def check(self) -> None:
        """Raise AssertionError if the cache's counts contradict each other."""
        self._store.check()
