"""A fleet: arrivals, a router, replicas that fail and come back, retries, and an autoscaler, in simulated time.

arrival ---> router ---> replica ---> answered
                ^            |
                +---retry----+    a failed replica, a refused connection, or a client's timeout, before the first
                                  token; afterwards the request ends with an error
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from speculant.errors import ConfigError
from speculant.lab.fleet.config import FleetConfig, ReplicaLimits, Scaling
from speculant.lab.fleet.replica import EngineCosts, FleetRequest, Replica, StepTable
from speculant.lab.fleet.traffic import Arrival, Router

if TYPE_CHECKING:
    from simpy import Environment


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
