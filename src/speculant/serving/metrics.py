"""Prometheus metrics with a configurable prefix, and also under vLLM's names. Each app has its own registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from speculant.engine.generation import StreamPiece
from speculant.metrics import EngineMetrics

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                       40.0, 80.0, 160.0)  # fmt: skip
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                   240.0, 480.0, 960.0)  # fmt: skip
_LABELS = ("model_name",)
_VLLM = "vllm"  # the prefix of vLLM's metrics

# Totals of the engine: name, description, and the field of `EngineMetrics`.
_COUNTERS = (
    ("prompt_tokens", "Tokens of the prompts of ended requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "tokens"),
    (
        "generation_passes",
        "Target passes that gave a sequence tokens, per sequence; generation_tokens over these is the tokens per pass.",
        "sampled_passes",
    ),
    ("num_preemptions", "Sequences preempted, for memory or for another client.", "preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("spec_decode_num_drafts", "Drafts verified.", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_tokens"),
)
_GAUGES = (
    ("num_requests_running", "Sequences that run.", "running"),
    ("num_requests_waiting", "Sequences that wait for their first step, or for memory.", "waiting"),
)


# Metrics that dashboards for vLLM read; they mean the same here.
VLLM_NAMES = frozenset(
    {
        *("prompt_tokens", "generation_tokens", "num_preemptions", "request_success"),
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e_request_latency_seconds",
    }
)


class ServerMetrics:
    """The registry of one server. read: returns the engine's totals, or None while there is no engine.

    read_cache: returns the cache's settings, as labels of `cache_config_info`.
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        read: Callable[[], EngineMetrics | None],
        read_cache: Callable[[], Mapping[str, str] | None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineTotals(prefix, model, read, read_cache))
        self._prefix = prefix
        histograms = {
            "time_to_first_token_seconds": ("Time to the first token.", FIRST_TOKEN_BUCKETS),
            "inter_token_latency_seconds": ("Time between a token and the next one.", TOKEN_BUCKETS),
            "time_per_output_token_seconds": ("The same under its older name.", TOKEN_BUCKETS),
            "e2e_request_latency_seconds": ("Time from a prompt's arrival to its end.", REQUEST_BUCKETS),
        }
        self.first_token, self.next_token, self.next_token_by_old_name, self.request = (
            Histogram(f"{prefix}:{name}", text, _LABELS, buckets=buckets, registry=self.registry).labels(model)
            for name, (text, buckets) in histograms.items()
        )
        self._ended = Counter(
            f"{prefix}:request_success", "Samples ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self._model = model
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(model, reason)

    def count_end(self, reason: str) -> None:
        """Count a sample that ended: stop, length, abort or error."""
        self._ended.labels(self._model, reason).inc()

    def page(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its media type."""
        page = generate_latest(self.registry)
        if self._prefix == _VLLM:
            return page, CONTENT_TYPE_LATEST
        again = CollectorRegistry()
        again.register(_UnderOtherPrefix(self.registry, self._prefix, _VLLM, VLLM_NAMES))
        return page + generate_latest(again), CONTENT_TYPE_LATEST


class RequestMeter:
    """Measures one request at the arrival of its pieces. Samples that have not ended at `close` count as aborted."""

    def __init__(self, metrics: ServerMetrics, samples: int) -> None:
        self._metrics, self._open = metrics, samples
        self._started = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # by prompt and sample

    def record(self, prompt: int, piece: StreamPiece) -> None:
        """Count a piece."""
        now = time.perf_counter()
        sample = prompt, piece.index
        if (last := self._last.get(sample)) is None:
            self._metrics.first_token.observe(now - self._started)
        elif piece.token is not None:
            self._metrics.next_token.observe(now - last)
            self._metrics.next_token_by_old_name.observe(now - last)
        self._last[sample] = now
        if piece.finish_reason is not None:
            self._open -= 1
            self._metrics.count_end(piece.finish_reason)
            self._metrics.request.observe(now - self._started)

    def close(self, failed: bool) -> None:
        """Count the samples that have not ended: as errors if the request failed, else as aborted."""
        for _ in range(self._open):
            self._metrics.count_end("error" if failed else "abort")
        self._open = 0


class _EngineTotals(Collector):
    """Reads the engine's counters when the metrics are collected."""

    def __init__(
        self,
        prefix: str,
        model: str,
        read: Callable[[], EngineMetrics | None],
        read_cache: Callable[[], Mapping[str, str] | None],
    ) -> None:
        self._prefix, self._model, self._read, self._read_cache = prefix, model, read, read_cache

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        totals = self._read() or EngineMetrics()
        for name, text, field in _COUNTERS:
            yield self._sample(CounterMetricFamily, name, text, getattr(totals, field))
        for name, text, field in _GAUGES:
            yield self._sample(GaugeMetricFamily, name, text, getattr(totals, field))
        usage = totals.blocks_used / totals.blocks_total if totals.blocks_total else 0.0
        yield self._sample(GaugeMetricFamily, "kv_cache_usage_perc", "Share of the cache in use, 1 = all.", usage)
        yield self._per_position(totals)
        if (cache := self._read_cache()) is not None:
            names = sorted(cache)
            name = f"{self._prefix}:cache_config_info"
            family = GaugeMetricFamily(name, "The cache's settings, as labels.", labels=(*_LABELS, *names))
            family.add_metric([self._model, *(cache[each] for each in names)], 1)
            yield family

    def _sample(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric([self._model], value)
        return family

    def _per_position(self, totals: EngineMetrics) -> Metric:
        name = f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Draft tokens accepted at each position.", labels=(*_LABELS, "position"))
        for position, count in enumerate(totals.accepted_per_position):
            family.add_metric([self._model, str(position)], count)
        return family


class _UnderOtherPrefix(Collector):
    """Copies some metrics of a registry, with another prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str, other: str, names: Collection[str]) -> None:
        self._registry, self._prefix, self._other, self._names = registry, f"{prefix}:", f"{other}:", names

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        for family in self._registry.collect():
            name = family.name.removeprefix(self._prefix)
            if name in self._names:
                shown = Metric(self._other + name, family.documentation, family.type)
                shown.samples = [
                    sample._replace(name=self._other + sample.name.removeprefix(self._prefix))
                    for sample in family.samples
                ]
                yield shown
