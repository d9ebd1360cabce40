"""The settings of a fleet, of its replicas and of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

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
