"""Prometheus metrics with a configurable prefix, and also under vLLM's names. Each app has its own registry.

Names, kinds, labels and buckets are vLLM's, so that gateways and dashboards for vLLM can read the page. No label has a
value that a client chose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from speculant.engine import StreamPiece
from speculant.metrics import STEP_TOKENS, EngineMetrics, TimingMetrics
from speculant.params import SamplingParams
from speculant.serving.errors import api_error
from speculant.serving.records import RequestRecord
from speculant.types import RequestOutput

# vLLM's buckets, after smaller ones for small models.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                       40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                   240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
N_BUCKETS = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")
_ENGINE = "0"  # one server has one engine
_VLLM = "vllm"  # the prefix of vLLM's metrics
_OWN_NAMES = frozenset({"generation_passes"})  # vLLM has no such metrics

# Totals of the engine: name, description, and the field of `EngineMetrics`.
_COUNTERS = (
    ("prompt_tokens", "Tokens of the prompts of ended requests.", "prompt_tokens"),
    ("prompt_tokens_cached", "Those of them that were found in the prefix cache.", "prefix_hit_tokens"),
    ("generation_tokens", "Tokens generated.", "tokens"),
    (
        "generation_passes",
        "Target passes that gave a sequence tokens, per sequence; generation_tokens over these is the tokens per pass.",
        "sampled_passes",
    ),
    ("num_preemptions", "Sequences preempted, for memory or for another client.", "preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("gpu_prefix_cache_queries", "prefix_cache_queries under its older name.", "prompt_tokens"),
    ("gpu_prefix_cache_hits", "prefix_cache_hits under its older name.", "prefix_hit_tokens"),
    ("spec_decode_num_drafts", "Drafts verified.", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_tokens"),
)
_GAUGES = (
    ("num_requests_running", "Sequences that run.", "running"),
    ("num_requests_waiting", "Sequences that wait for their first step, or for memory.", "waiting"),
)
_USAGE = (
    ("kv_cache_usage_perc", "Share of the cache in use, 1 = all."),
    ("gpu_cache_usage_perc", "The same under its older name."),
)

# Histograms of the times of samples that came to their end; None = the sample has no such time.
_TIMES: Mapping[str, tuple[str, tuple[float, ...], Callable[[TimingMetrics], float | None]]] = MappingProxyType(
    {
        "request_queue_time_seconds": (
            "Time from a sample's arrival to its first step.",
            REQUEST_BUCKETS,
            lambda timing: timing.queue_s,
        ),
        "request_prefill_time_seconds": (
            "Time from a sample's first step to its first token.",
            REQUEST_BUCKETS,
            lambda timing: timing.prompt_s,
        ),
        "request_decode_time_seconds": (
            "Time from a sample's first token to its last.",
            REQUEST_BUCKETS,
            lambda timing: None if timing.first_token is None else timing.decode_s,
        ),
        "request_inference_time_seconds": (
            "Time from a sample's first step to its last token.",
            REQUEST_BUCKETS,
            lambda timing: None if timing.prompt_s is None else timing.prompt_s + timing.decode_s,
        ),
        "request_time_per_output_token_seconds": (
            "Mean time between the tokens of a sample.",
            TOKEN_BUCKETS,
            lambda timing: timing.decode_s / (timing.num_tokens - 1) if timing.num_tokens > 1 else None,
        ),
    }
)
_SIZES: Mapping[str, str] = MappingProxyType(  # histograms of tokens, with buckets up to the context's length
    {
        "request_prompt_tokens": "Tokens of a sample's prompt.",
        "request_prefill_kv_computed_tokens": "Tokens of a sample's prompt that were not found in the prefix cache.",
        "request_generation_tokens": "Tokens of a sample.",
        "request_max_num_generation_tokens": "Tokens of the longest sample of a prompt.",
        "request_params_max_tokens": "max_tokens of a sample's request, if it is given.",
    }
)


def token_buckets(most: int) -> list[int]:
    """Return 1, 2, 5, 10 and so on, up to `most`."""
    ladder = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [bound for bound in ladder if bound <= most]


class ServerMetrics:
    """The registry of one server. read: returns the engine's totals, or None while there is no engine.

    read_cache: returns the cache's settings, as labels of `cache_config_info`. longest: returns how many tokens a
    sequence may have, once `read` returns totals.
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        read: Callable[[], EngineMetrics | None],
        read_cache: Callable[[], Mapping[str, str] | None] = lambda: None,
        longest: Callable[[], int] = lambda: 1,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineTotals(prefix, model, read, read_cache))
        self._prefix, self._model, self._read, self._longest = prefix, model, read, longest
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.next_token, self.next_token_by_old_name = (
            self._histogram(name, text, TOKEN_BUCKETS)
            for name, text in (
                ("inter_token_latency_seconds", "Time between a token and the next one."),
                ("time_per_output_token_seconds", "The same under its older name."),
            )
        )
        self.request = self._histogram(
            "e2e_request_latency_seconds", "Time from a sample's arrival to its end.", REQUEST_BUCKETS
        )
        self._n = self._histogram("request_params_n", "Samples of a prompt, n.", N_BUCKETS)
        self._times = {name: self._histogram(name, text, buckets) for name, (text, buckets, _) in _TIMES.items()}
        self._sizes: dict[str, Histogram] = {}
        self._ended = Counter(
            f"{prefix}:request_success", "Samples ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(model, _ENGINE, reason)

    def count_end(self, reason: str) -> None:
        """Count a sample that ended: stop, length, abort or error."""
        self._ended.labels(self._model, _ENGINE, reason).inc()

    def observe(self, output: RequestOutput, params: SamplingParams) -> None:
        """Measure a prompt's samples, all of which have ended."""
        sizes, prompt = self._size_histograms(), output.num_prompt_tokens
        self._n.observe(params.n)
        sizes["request_max_num_generation_tokens"].observe(max(len(each.token_ids) for each in output.outputs))
        for sample in output.outputs:
            sizes["request_prompt_tokens"].observe(prompt)
            sizes["request_generation_tokens"].observe(len(sample.token_ids))
            if params.max_tokens is not None:
                sizes["request_params_max_tokens"].observe(params.max_tokens)
            if sample.metrics is not None:
                sizes["request_prefill_kv_computed_tokens"].observe(prompt - sample.metrics.cached_tokens)
                self._observe_times(sample.metrics.timing)

    def page(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its media type."""
        if self._read() is not None:
            self._size_histograms()
        page = generate_latest(self.registry)
        if self._prefix != _VLLM:
            page += b"".join(_under_vllm_prefix(page, self._prefix))
        return page, CONTENT_TYPE_LATEST

    def _observe_times(self, timing: TimingMetrics) -> None:
        for name, (_, _, seconds_of) in _TIMES.items():
            if (seconds := seconds_of(timing)) is not None:
                self._times[name].observe(seconds)

    def _size_histograms(self) -> dict[str, Histogram]:
        """Return the histograms of tokens, whose buckets depend on the engine."""
        if not self._sizes:
            buckets = token_buckets(self._longest())
            self._sizes = {name: self._histogram(name, text, buckets) for name, text in _SIZES.items()}
        return self._sizes

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"{self._prefix}:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return made.labels(self._model, _ENGINE)


class RequestMeter:
    """Measures one request at the arrival of its pieces. It is a context manager around the generation.

    record: the record of the request for logs and traces, if there is one.
    """

    def __init__(
        self, metrics: ServerMetrics, samples: int, params: SamplingParams, record: RequestRecord | None = None
    ) -> None:
        self._metrics, self._open, self._params, self._record = metrics, samples, params, record
        self._started = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # by prompt and sample, when its newest token arrived

    def record(self, prompt: int, piece: StreamPiece) -> None:
        """Count a piece."""
        now = time.perf_counter()
        if self._record is not None:
            self._record.count(piece, now)
        sample = prompt, piece.index
        if piece.token is not None:
            if (last := self._last.get(sample)) is None:
                self._metrics.first_token.observe(now - self._started)
            else:
                self._metrics.next_token.observe(now - last)
                self._metrics.next_token_by_old_name.observe(now - last)
            self._last[sample] = now
        if piece.finish_reason is not None:
            self._open -= 1
            self._metrics.count_end(piece.finish_reason)
            self._metrics.request.observe(now - self._started)
        if piece.output is not None:
            self._metrics.observe(piece.output, self._params)

    def __enter__(self) -> RequestMeter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Count the samples that have not ended: as aborted if nobody waits for them any more, else as errors.

        Samples of a request that was refused before it began are no samples.
        """
        refused = not self._last and isinstance(error, Exception) and api_error(error).status < 500
        if not self._open or refused:
            return
        reason = "abort" if isinstance(error, GeneratorExit | asyncio.CancelledError) else "error"
        if self._record is not None:
            self._record.end = "aborted" if reason == "abort" else reason
        for _ in range(self._open):
            self._metrics.count_end(reason)


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
        for name, text in _USAGE:
            yield self._sample(GaugeMetricFamily, name, text, usage)
        yield self._per_position(totals)
        yield self._tokens_of_steps(totals)
        yield self._adapters()
        if (cache := self._read_cache()) is not None:
            names = sorted(cache)
            name = f"{self._prefix}:cache_config_info"
            family = GaugeMetricFamily(name, "The cache's settings, as labels.", labels=(*names, "engine"))
            family.add_metric([*(cache[each] for each in names), _ENGINE], 1)
            yield family

    def _sample(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric([self._model, _ENGINE], value)
        return family

    def _per_position(self, totals: EngineMetrics) -> Metric:
        name = f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Draft tokens accepted at each position.", labels=(*_LABELS, "position"))
        for position, count in enumerate(totals.accepted_per_position):
            family.add_metric([self._model, _ENGINE, str(position)], count)
        return family

    def _tokens_of_steps(self, totals: EngineMetrics) -> Metric:
        text = "Prompt tokens computed and tokens generated in a step, together."
        family = HistogramMetricFamily(f"{self._prefix}:iteration_tokens_total", text, labels=_LABELS)
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
        counts = list(zip(bounds, accumulate(totals.step_tokens), strict=True))
        family.add_metric([self._model, _ENGINE], counts, totals.computed_tokens)
        return family

    def _adapters(self) -> Metric:
        """Return the adapters, of which there are none. The value is the time, by which gateways find the newest."""
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily(f"{self._prefix}:lora_requests_info", "LoRA adapters; there are none.", labels=names)
        family.add_metric(["0", "", ""], time.time())
        return family


def _under_vllm_prefix(page: bytes, prefix: str) -> Iterator[bytes]:
    """Yield the lines of a page once more, with vLLM's prefix; metrics that vLLM does not have are left out."""
    own, other, shown = f"{prefix}:".encode(), f"{_VLLM}:".encode(), False
    for line in page.splitlines(keepends=True):
        if line.startswith(b"# HELP "):
            name = line.split(b" ", 3)[2].decode("ascii").removeprefix(f"{prefix}:")
            shown = name.removesuffix("_created").removesuffix("_total") not in _OWN_NAMES
        if shown:
            yield line.replace(own, other, 1)
