"""An engine's totals as metrics in vLLM's form and names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculant.metrics import EngineMetrics


@dataclass(frozen=True)
class Metric:
    """A metric. labels: model_name and others."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A total that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Totals by place: accepted draft tokens at each position of a draft."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How many observations do not exceed each bound of `buckets`, "+Inf" among them; their number and sum.

    An engine measures none; a server does, because requests arrive and end there.
    """

    count: int
    sum: float
    buckets: dict[str, int]


_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "prefix_hit_tokens",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}
_STATE = ("waiting", "running", "blocks_used", "blocks_total", "block_size")  # our own figures that are no totals
_GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}


def read_metrics(totals: EngineMetrics, model: str) -> list[Metric]:
    """Return the totals under vLLM's names ("vllm:prompt_tokens"), then each under its own ("speculant:steps")."""
    labels, usage = {"model_name": model}, totals.blocks_used / totals.blocks_total if totals.blocks_total else 0.0
    found: list[Metric] = [Counter(f"vllm:{name}", labels, getattr(totals, own)) for name, own in _COUNTERS.items()]
    found += [Gauge(f"vllm:{name}", labels, float(getattr(totals, own))) for name, own in _GAUGES.items()]
    found.append(Gauge("vllm:kv_cache_usage_perc", labels, usage))
    positions = list(totals.accepted_per_position)
    found.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, positions))
    return found + [_own(f"speculant:{name}", labels, value) for name, value in totals.to_dict().items()]


def _own(name: str, labels: dict[str, str], value: Any) -> Metric:
    if isinstance(value, tuple):
        return Vector(name, labels, list(value))
    falls = isinstance(value, float) or name.partition(":")[2] in _STATE
    return Gauge(name, labels, float(value)) if falls else Counter(name, labels, int(value))
