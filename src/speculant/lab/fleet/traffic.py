"""The requests that come to a fleet: drawn from distributions, or read from a trace."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError
from speculant.lab.fleet.config import TrafficConfig

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
