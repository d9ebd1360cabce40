"""The settings of a fleet, its requests, drawn or read from a trace, and the router that places them."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import accumulate
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError

LONGEST = 16  # tokens of a draft
AUTO = "auto"


class Routing(StrEnum):
    """How a router chooses; each is a method of `Router`."""

    RANDOM = auto()
    LEAST = auto()
    TWO = auto()
    PREFIX = auto()
    PREFIX_BOUNDED = "prefix-bounded"


@dataclass(frozen=True)
class ReplicaLimits:
    """The limits of a replica's engine; see `EngineConfig`.

    kv_tokens: positions of its KV cache. draft_length: a number of tokens, or "auto" for the one with the most expected
    tokens per second at each load.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    kv_tokens: int = 65536
    block_size: int = 16
    prefix_caching: bool = True
    draft_length: str = AUTO

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not above 0", f"set {name} to 1 or more.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}",
                "every running sequence needs a token per step; raise max_num_batched_tokens.",
            )
        _ = self.fixed_length

    @property
    def fixed_length(self) -> int | None:
        """The length of all drafts; None = chosen at each load."""
        if self.draft_length == AUTO:
            return None
        if self.draft_length.isdecimal() and int(self.draft_length) <= LONGEST:
            return int(self.draft_length)
        raise ConfigError(
            f"draft_length={self.draft_length!r} is not auto or a number up to {LONGEST}", "use --draft-length auto."
        )


@dataclass(frozen=True)
class TrafficConfig:
    """Poisson arrivals.

    rate: requests per second. surge_at, surge_rate: from this second on the rate is another one; None = never.
    variation: standard deviation of a length over its mean, of log-normal lengths; 0 = all have the mean. prefixes: the
    number of shared prefixes, 0 = none. zipf: the k-th prefix is drawn in proportion to k^-zipf.
    """

    rate: float = 1.0
    requests: int = 1000
    prompt_tokens: int = 256
    prompt_variation: float = 0.0
    answer_tokens: int = 128
    answer_variation: float = 0.0
    prefixes: int = 0
    prefix_tokens: int = 0
    zipf: float = 1.0
    surge_at: float | None = None
    surge_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "requests", "prompt_tokens", "answer_tokens"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not above 0", f"set {name} above 0.")
        for name in ("prompt_variation", "answer_variation", "prefixes", "prefix_tokens", "zipf"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not a number of 0 or more", f"set {name} to 0.")
        if bool(self.prefixes) != bool(self.prefix_tokens) or self.prefix_tokens >= self.prompt_tokens:
            raise ConfigError(
                f"{self.prefixes} prefixes have {self.prefix_tokens} of a prompt's {self.prompt_tokens} tokens",
                "use for example --prefixes 100 --prefix-tokens 512 --prompt-tokens 600.",
            )
        if (self.surge_at is None) != (self.surge_rate is None) or not (self.surge_rate is None or self.surge_rate > 0):
            raise ConfigError(
                f"surge_at={self.surge_at} and surge_rate={self.surge_rate} do not belong together",
                "use for example --surge-at 60 --surge-rate 20.",
            )


@dataclass(frozen=True)
class Scaling:
    """An autoscaler: as many replicas as give each `target` requests that wait or run.

    It looks every `interval_s`, and acts once more replicas were needed for up_s, or fewer for down_s.
    """

    least: int
    most: int
    target: float = 8.0
    interval_s: float = 1.0
    up_s: float = 30.0
    down_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"autoscale={self.least}:{self.most} is no range of replicas", "use --autoscale 2:8.")
        for name in ("target", "interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not above 0", f"set {name} above 0.")


@dataclass(frozen=True)
class FleetConfig:
    """The settings of a fleet; see `Router` for routing and threshold.

    stale_s: seconds between reports of loads to the router, 0 = it always knows them. failure_s: mean time until a
    replica fails, None = never. lose, lose_at: this many replicas fail together at this second. start_s: until a failed
    or added replica serves. detect_s: until the router knows that a replica has failed; until then it sees no load
    there, and requests that it sends are refused. retries: of a request, each retry_s later. timeout_s: clients give up
    without a first token, None = never.
    """

    replicas: int = 1
    routing: str = Routing.TWO
    threshold: float = 4.0
    stale_s: float = 0.0
    failure_s: float | None = None
    lose: int = 0
    lose_at: float = 0.0
    start_s: float = 60.0
    detect_s: float = 0.0
    retries: int = 2
    retry_s: float = 0.0
    timeout_s: float | None = None
    scaling: Scaling | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas} is not above 0", "use --replicas 2.")
        if self.routing not in list(Routing):
            raise ConfigError(f"routing={self.routing!r} is unknown", f"use one of {', '.join(Routing)}.")
        for name in ("threshold", "stale_s", "lose", "lose_at", "start_s", "detect_s", "retries", "retry_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is below 0", f"set {name} to 0 or more.")
        for name in ("failure_s", "timeout_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name}={value} is not above 0", f"set {name} above 0, or leave it out.")


LINE = '{"seconds": 0.5, "prompt_tokens": 300, "prefix": "a", "prefix_tokens": 256, "answer_tokens": 64}'


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, and its sizes in tokens. shared: of the prompt's first tokens; `prefix` names them."""

    seconds: float
    prompt: int
    answer: int
    prefix: str | int | None = None
    shared: int = 0


def arrivals(config: TrafficConfig, seed: str) -> list[Arrival]:
    """Draw the requests, in order."""
    rng, now, found = random.Random(f"{seed}, traffic"), 0.0, list[Arrival]()
    weights = list(accumulate((rank + 1) ** -config.zipf for rank in range(config.prefixes)))
    shared = config.prefix_tokens
    for _ in range(config.requests):
        now = _next(now, config, rng)
        own = _length(config.prompt_tokens - shared, config.prompt_variation, rng)
        answer = _length(config.answer_tokens, config.answer_variation, rng)
        prefix = bisect(weights, rng.random() * weights[-1]) if weights else None
        found.append(Arrival(now, shared + own, answer, prefix, shared))
    return found


def _next(now: float, config: TrafficConfig, rng: random.Random) -> float:
    """Return the time of the next arrival; after the surge began, time runs at another rate."""
    rate, wait = config.rate, rng.expovariate(1.0)
    if config.surge_at is None or config.surge_rate is None:
        return now + wait / rate
    if now < config.surge_at:
        before = (config.surge_at - now) * rate
        if wait < before:
            return now + wait / rate
        now, wait = config.surge_at, wait - before
    return now + wait / config.surge_rate


def _length(mean: int, variation: float, rng: random.Random) -> int:
    if not variation:
        return mean
    sigma = math.sqrt(math.log1p(variation**2))
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def read_trace(path: Path) -> list[Arrival]:
    """Read requests from a file with a JSON object per line. Raises ConfigError."""
    try:
        found = list(_lines(path))
    except OSError as error:
        raise ConfigError(f"the trace {path} can't be read: {error}", "check the path.") from error
    if not found:
        raise ConfigError(f"the trace {path} has no requests", f"write lines such as {LINE}")
    return sorted(found, key=lambda each: each.seconds)


def _lines(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _arrival(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(f"line {number} of {path} is no request: {error}", f"write {LINE}") from error


def _arrival(line: Any) -> Arrival:
    unknown = set(line) - {"seconds", "prompt_tokens", "answer_tokens", "prefix", "prefix_tokens"}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    seconds, prompt, answer = float(line["seconds"]), int(line["prompt_tokens"]), int(line["answer_tokens"])
    prefix, shared = line.get("prefix"), int(line.get("prefix_tokens", 0))
    if not (math.isfinite(seconds) and seconds >= 0 and min(prompt, answer) >= 1 and 0 <= shared <= prompt):
        raise ValueError("a number is out of range")
    return Arrival(seconds, prompt, answer, None if prefix is None else str(prefix), shared if prefix else 0)


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
    """Chooses the replica of a request, by one of these methods.

    random           any replica
    least            a replica with the fewest requests (that wait or run), of all
    two              the one with fewer requests, of two random ones
    prefix           of the replicas that got a request with this prefix before, the one with the fewest requests; as
                     `two` if there is none, or if loads are imbalanced: the most and the fewest requests of a replica
                     differ by more than a threshold (the rule of Ray's PrefixCacheAffinityRouter)
    prefix-bounded   the same, but only the chosen replica's load counts: it may have at most `threshold` requests more
                     than the choice of `two`, which otherwise gets the request, and from then on has the prefix too

    Loads may be old: a router that hears of them every few seconds sees the numbers of the last report. It does not
    hear of evictions, so it may take a replica to have a prefix that it has lost. holders: the replicas that were sent
    each prefix; updates: how often that changed.
    """

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
        """The least loaded replica with the prefix, if its load is not far above the other choice's."""
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
