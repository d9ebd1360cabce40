"""A fleet: arrivals, a router, replicas that fail and come back, retries, and an autoscaler, in simulated time.

arrival ---> router ---> replica ---> answered
                ^            |
                +---retry----+    a failed replica, a refused connection, or a client's timeout, before the first
                                  token; afterwards the request ends with an error

A replica is the loop of an engine:

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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from speculant.errors import ConfigError
from speculant.lab.fleet.traffic import LONGEST, Arrival, FleetConfig, ReplicaLimits, Router, Scaling
from speculant.lab.theory import VerificationCurve, expected_tokens, survival

if TYPE_CHECKING:
    from simpy import Environment, Event


@dataclass(frozen=True)
class EngineCosts:
    """The measured costs of one engine.

    seconds: of a target pass by its rows. rates: acceptance by depth. cost_ratio: c, a draft token's time over the time
    of a target pass with as many rows as sequences. draft_overhead: the fixed time of a draft over a pass of one row.
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
        """Drop a request whose client has gone. The current step still computes its rows."""
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


Events = Generator[Any, Any, None]
Progress = Callable[[float], None]
REPORTS = 100  # of the progress of a simulation


@dataclass
class FleetRun:
    """What happened: all requests, in order of arrival, and figures of the fleet.

    machine_s, busy_s: of all replicas, from their start. refused: requests sent to failed replicas. most_entries,
    updates: of the router's table of prefixes. lost: prompt and answer tokens are not counted here.
    """

    requests: list[FleetRequest] = field(default_factory=list)
    seconds: float = 0.0
    machine_s: float = 0.0
    busy_s: float = 0.0
    refused: int = 0
    failures: int = 0
    timeouts: int = 0
    most_replicas: int = 0
    most_entries: int = 0
    updates: int = 0


def simulate_fleet(
    config: FleetConfig,
    costs: EngineCosts,
    limits: ReplicaLimits,
    traffic: Sequence[Arrival],
    progress: Progress | None = None,
) -> FleetRun:
    """Simulate a fleet until every request has ended. Equal arguments give equal results.

    Raises ConfigError if simpy is not installed, or if a request does not fit into a replica's memory.
    """
    return _Fleet(config, costs, limits).run(traffic, progress)


def environment() -> Environment:
    """Return simpy's clock and queue of events. Raises ConfigError if it is not installed."""
    try:
        import simpy
    except ImportError as error:
        raise ConfigError("simpy is not installed", 'pip install -c constraints.txt "speculant[fleet]"') from error
    return simpy.Environment()


class _Fleet:
    def __init__(self, config: FleetConfig, costs: EngineCosts, limits: ReplicaLimits) -> None:
        self._config, self._costs, self._limits = config, costs, limits
        self._env, self._table = environment(), StepTable(costs, limits)
        self._chance = random.Random(f"{config.seed}, failures and acceptance")
        self._router = Router(config.routing, config.threshold, random.Random(f"{config.seed}, routing"))
        self._replicas = dict[int, Replica]()  # that serve, also those that only end their requests
        self._since = dict[int, float]()  # when each machine was taken, also of those that start
        self._failed = set[int]()  # that the router does not know of
        self._draining = set[int]()
        self._stale = set[int]()  # whose load the router will hear of
        self._retrying = 0
        self._run, self._open, self._number = FleetRun(), 0, 0
        self._homeless = list[FleetRequest]()
        self._done = self._env.event()

    def run(self, traffic: Sequence[Arrival], progress: Progress | None) -> FleetRun:
        config, scaling = self._config, self._config.scaling
        number = config.replicas if scaling is None else min(max(config.replicas, scaling.least), scaling.most)
        for _ in range(number):
            self._start(self._take_machine())
        if not all(next(iter(self._replicas.values())).can_hold(each) for each in traffic):
            raise ConfigError(
                f"a request has more tokens than kv_tokens={self._limits.kv_tokens}", "raise --kv-tokens."
            )
        self._open = len(traffic)
        self._env.process(self._arrive(traffic, progress))
        if config.failure_s is not None:
            self._env.process(self._fail_at_random(config.failure_s))
        if config.lose:
            self._env.process(self._lose())
        if config.stale_s:
            self._env.process(self._report_loads())
        if scaling is not None:
            self._env.process(self._scale(scaling))
        if traffic:
            self._env.run(until=self._done)
        return self._finished()

    def _finished(self) -> FleetRun:
        run, now = self._run, self._env.now
        run.seconds = now
        for number in list(self._since):
            self._give_machine(number)
        run.busy_s += sum(each.busy_s for each in self._replicas.values())
        run.most_entries, run.updates = self._router.most_entries, self._router.updates
        return run

    # Requests

    def _arrive(self, traffic: Sequence[Arrival], progress: Progress | None) -> Events:
        every = max(1, len(traffic) // REPORTS)
        for index, arrival in enumerate(traffic):
            if arrival.seconds > self._env.now:
                yield self._env.timeout(arrival.seconds - self._env.now)
            request = FleetRequest(arrival, exponent=self._exponent())
            self._run.requests.append(request)
            self._send(request)
            if progress is not None and index % every == 0:
                progress(index / len(traffic))

    def _exponent(self) -> float:
        """Draw how much less a request's tokens are accepted than the mean request's; see `FleetRequest`.

        A request's rate is r^(1 / e), with r the mean rate at each depth. At the first depth it has a beta
        distribution.
        """
        mean, spread = self._costs.rates[0], self._costs.spread
        if not spread:
            return 1.0
        size = mean * (1 - mean) / spread**2 - 1
        rate = self._chance.betavariate(mean * size, (1 - mean) * size)
        if not 0 < rate < 1:
            return math.inf if rate else 0.0
        return math.log(mean) / math.log(rate)

    def _send(self, request: FleetRequest) -> None:
        number = self._router.choose(request.arrival)
        if number is None:
            self._homeless.append(request)  # until a replica serves
            return
        request.tries += 1
        if number in self._failed:
            self._run.refused += 1
            self._retry(request, "the replica had failed")
            return
        replica = self._replicas[number]
        request.replica = replica
        replica.add(request)
        self._changed(replica)
        if self._config.timeout_s is not None:
            self._watch(request, self._config.timeout_s)

    def _watch(self, request: FleetRequest, seconds: float) -> None:
        tries, timeout = request.tries, self._env.timeout(seconds)

        def give_up(_: object) -> None:
            replica = request.replica
            if replica is not None and request.first_s is None and request.tries == tries:
                self._run.timeouts += 1
                replica.remove(request)
                self._changed(replica)
                self._end_if_drained(replica)
                self._retry(request, "no first token in time")

        timeout.callbacks.append(give_up)

    def _retry(self, request: FleetRequest, problem: str) -> None:
        request.replica = None
        if request.first_s is not None or request.tries > self._config.retries:
            request.error, request.end_s = problem, self._env.now
            self._close()
            return
        self._env.timeout(self._config.retry_s).callbacks.append(lambda _: self._send(request))

    def _answered(self, request: FleetRequest) -> None:
        replica, request.replica = request.replica, None
        assert replica is not None, "an answer from nowhere"
        self._changed(replica)
        self._end_if_drained(replica)
        self._close()

    def _end_if_drained(self, replica: Replica) -> None:
        if replica.number in self._draining and not replica.load:
            self._remove(replica.number)

    def _close(self) -> None:
        self._open -= 1
        if not self._open:
            self._done.succeed()

    def _changed(self, replica: Replica) -> None:
        if replica.number in self._router.members:
            if self._config.stale_s:
                self._stale.add(replica.number)
            else:
                self._router.members.update(replica.number, replica.load)

    def _report_loads(self) -> Events:
        while True:
            yield self._env.timeout(self._config.stale_s)
            for number in sorted(self._stale):
                if number in self._router.members:
                    replica = self._replicas.get(number)
                    self._router.members.update(number, 0 if replica is None else replica.load)
            self._stale.clear()

    # Replicas

    def _take_machine(self) -> int:
        self._number += 1
        self._since[self._number] = self._env.now
        self._run.most_replicas = max(self._run.most_replicas, len(self._since))
        return self._number

    def _give_machine(self, number: int) -> None:
        self._run.machine_s += self._env.now - self._since.pop(number)

    def _start(self, number: int) -> None:
        if number not in self._since:  # it was given back before it served
            return
        rng = random.Random(f"{self._config.seed}, replica {number}")
        self._replicas[number] = Replica(number, self._env, self._table, self._limits, rng, self._answered)
        self._router.members.add(number, 0)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._send(request)

    def _start_later(self, number: int) -> None:
        self._env.timeout(self._config.start_s).callbacks.append(lambda _: self._start(number))

    def _remove(self, number: int) -> None:
        """Give back a replica that has no requests."""
        self._run.busy_s += self._replicas.pop(number).busy_s
        self._draining.discard(number)
        self._give_machine(number)

    def _fail_at_random(self, mean_s: float) -> Events:
        """Fail replicas: each has exponential times, so the next one of n comes after mean_s / n on average."""
        while True:
            yield self._env.timeout(self._chance.expovariate(max(1, len(self._replicas)) / mean_s))
            if self._replicas:
                self._fail(self._chance.choice(list(self._replicas)))

    def _lose(self) -> Events:
        yield self._env.timeout(self._config.lose_at)
        lost = sorted(self._replicas)[: self._config.lose]
        for number in lost:
            self._fail(number)

    def _fail(self, number: int) -> None:
        replica = self._replicas.pop(number)
        lost = replica.stop()
        self._run.failures += 1
        self._run.busy_s += replica.busy_s
        if number in self._draining:
            self._draining.discard(number)
            self._give_machine(number)
        else:
            self._begin_repair(number)
        for request in lost:
            self._retry(request, "the replica failed")

    def _begin_repair(self, number: int) -> None:
        """Start another replica in the failed one's place; the router learns of the failure after detect_s."""
        self._give_machine(number)
        self._start_later(self._take_machine())
        if not self._config.detect_s:
            self._router.forget(number)
            return
        self._failed.add(number)
        if not self._config.stale_s:
            self._router.members.update(number, 0)
        else:
            self._stale.add(number)
        self._env.timeout(self._config.detect_s).callbacks.append(lambda _: self._detect(number))

    def _detect(self, number: int) -> None:
        self._failed.discard(number)
        self._router.forget(number)

    # Autoscaling

    def _scale(self, scaling: Scaling) -> Events:
        more = fewer = 0.0  # seconds for which more, or fewer replicas were needed
        while True:
            yield self._env.timeout(scaling.interval_s)
            have = len(self._since) - len(self._draining)
            outstanding = sum(each.load for each in self._replicas.values()) + len(self._homeless)
            wanted = min(max(math.ceil(outstanding / scaling.target), scaling.least), scaling.most)
            more = more + scaling.interval_s if wanted > have else 0.0
            fewer = fewer + scaling.interval_s if wanted < have else 0.0
            if wanted > have and more >= scaling.up_s:
                more = 0.0
                for _ in range(wanted - have):
                    self._start_later(self._take_machine())
            elif wanted < have and fewer >= scaling.down_s:
                fewer = 0.0
                self._drain(have - wanted)

    def _drain(self, count: int) -> None:
        """Give back the least loaded replicas, once they have ended their requests."""
        serving = [each for each in self._replicas.values() if each.number not in self._draining]
        for replica in sorted(serving, key=lambda each: (each.load, each.number))[:count]:
            self._router.forget(replica.number)
            self._draining.add(replica.number)
            if not replica.load:
                self._remove(replica.number)


HOUR = 3600.0
QUANTILES = (50, 99)


def figures(run: FleetRun, request_s: float = 0.0) -> dict[str, Any]:
    """Return the figures by name; None = undefined. Times are in seconds, those of answered requests.

    request_s: of each request outside of the engine. machine hours include the start of replicas. hit_rate: the share
    of prompt tokens that were found in a cache. mean_draft: drafted tokens per sequence and step.
    """
    answered = [each for each in run.requests if each.error is None and each.end_s is not None]
    tokens = sum(each.arrival.answer for each in answered)
    prompts, steps = sum(each.arrival.prompt for each in answered), sum(each.steps for each in answered)
    hours = run.machine_s / HOUR
    first = [each.first_s - each.arrival.seconds + request_s for each in answered if each.first_s is not None]
    whole = [each.end_s - each.arrival.seconds + request_s for each in answered if each.end_s is not None]
    return {
        "requests": len(run.requests),
        "errors": sum(each.error is not None for each in run.requests),
        "retries": sum(max(0, each.tries - 1) for each in run.requests),
        "refused": run.refused,
        "timeouts": run.timeouts,
        "failures": run.failures,
        "seconds": run.seconds,
        **_quantiles("first_token", first),
        **_quantiles("answer", whole),
        "tokens_per_s": tokens / run.seconds if run.seconds else None,
        "tokens_per_machine_hour": tokens / hours if hours else None,
        "machine_hours": hours,
        "utilisation": run.busy_s / run.machine_s if run.machine_s else None,
        "hit_rate": sum(each.reused for each in answered) / prompts if prompts else None,
        "mean_draft": sum(each.drafted for each in answered) / steps if steps else 0.0,
        "most_replicas": run.most_replicas,
        "router_entries": run.most_entries,
        "router_updates_per_s": run.updates / run.seconds if run.seconds else None,
    }


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    found = np.percentile(values, QUANTILES).tolist() if values else [None] * len(QUANTILES)
    mean = float(np.mean(values)) if values else None
    return {f"{name}_mean_s": mean, **{f"{name}_p{q}_s": each for q, each in zip(QUANTILES, found, strict=True)}}
