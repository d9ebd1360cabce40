"""Prometheus metrics with a configurable prefix, and also under vLLM's names. Each app has its own registry.

Names, kinds, labels and buckets are vLLM's, so that gateways and dashboards for vLLM can read the page. No label has a
value that a client chose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from typing_extensions import override

from speculant.engine import StreamPiece
from speculant.metrics import (
    ENGINE_FIGURES,
    STEP_TOKENS,
    Counter,
    EngineFigure,
    EngineMetrics,
    Gauge,
    Kind,
    TimingMetrics,
    Vector,
)
from speculant.params import SamplingParams
from speculant.serving.records import RequestRecord
from speculant.serving.wire import api_error
from speculant.types import CompletionOutput, RequestOutput

# vLLM's buckets, after smaller ones for small models.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                       40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                   240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
N_BUCKETS = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")
_ENGINE = "0"  # a page is about one engine; see `joined`
_LABEL = f'engine="{_ENGINE}"'  # within a label's value the quotes would be escaped
_VLLM = "vllm"  # the prefix of vLLM's metrics
_OWN_NAMES = frozenset(each.name for each in ENGINE_FIGURES if not each.vllm)
_FAMILIES: Mapping[Kind, type[CounterMetricFamily | GaugeMetricFamily]] = MappingProxyType(
    {Counter: CounterMetricFamily, Vector: CounterMetricFamily, Gauge: GaugeMetricFamily}
)

Read = Callable[[RequestOutput, SamplingParams], Iterable[float | None]]  # None = there is no such figure


class ServerHistogram(NamedTuple):
    """A histogram of what a server measures.

    read: its values for a prompt whose samples have all ended; None = it is measured when pieces arrive. buckets: empty
    = those of tokens, up to the context's length.
    """

    text: str
    buckets: tuple[float, ...]
    read: Read | None = None


def _of_each(read: Callable[[CompletionOutput, RequestOutput, SamplingParams], float | None]) -> Read:
    """Return a function that reads a value of each sample."""
    return lambda output, params: [read(sample, output, params) for sample in output.outputs]


def _time(read: Callable[[TimingMetrics], float | None]) -> Read:
    """Return a function that reads a time of each sample that was measured."""
    return _of_each(lambda sample, *_: None if sample.metrics is None else read(sample.metrics.timing))


FIRST_TOKEN, REQUEST = "time_to_first_token_seconds", "e2e_request_latency_seconds"
NEXT_TOKEN, NEXT_TOKEN_BY_OLD_NAME = "inter_token_latency_seconds", "time_per_output_token_seconds"
HISTOGRAMS: Mapping[str, ServerHistogram] = MappingProxyType(
    {
        FIRST_TOKEN: ServerHistogram("Time to the first token.", FIRST_TOKEN_BUCKETS),
        NEXT_TOKEN: ServerHistogram("Time between a token and the next one.", TOKEN_BUCKETS),
        NEXT_TOKEN_BY_OLD_NAME: ServerHistogram("The same under its older name.", TOKEN_BUCKETS),
        REQUEST: ServerHistogram("Time from a sample's arrival to its end.", REQUEST_BUCKETS),
        "request_params_n": ServerHistogram("Samples of a prompt, n.", N_BUCKETS, lambda _, params: [params.n]),
        "request_queue_time_seconds": ServerHistogram(
            "Time from a sample's arrival to its first step.", REQUEST_BUCKETS, _time(lambda timing: timing.queue_s)
        ),
        "request_prefill_time_seconds": ServerHistogram(
            "Time from a sample's first step to its first token.",
            REQUEST_BUCKETS,
            _time(lambda timing: timing.prompt_s),
        ),
        "request_decode_time_seconds": ServerHistogram(
            "Time from a sample's first token to its last.",
            REQUEST_BUCKETS,
            _time(lambda timing: None if timing.first_token is None else timing.decode_s),
        ),
        "request_inference_time_seconds": ServerHistogram(
            "Time from a sample's first step to its last token.",
            REQUEST_BUCKETS,
            _time(lambda timing: None if timing.prompt_s is None else timing.prompt_s + timing.decode_s),
        ),
        "request_time_per_output_token_seconds": ServerHistogram(
            "Mean time between the tokens of a sample.",
            TOKEN_BUCKETS,
            _time(lambda timing: timing.decode_s / (timing.num_tokens - 1) if timing.num_tokens > 1 else None),
        ),
        "request_prompt_tokens": ServerHistogram(
            "Tokens of a sample's prompt.", (), _of_each(lambda _, output, __: output.num_prompt_tokens)
        ),
        "request_prefill_kv_computed_tokens": ServerHistogram(
            "Tokens of a sample's prompt that were not found in the prefix cache.",
            (),
            _of_each(
                lambda sample, output, _: (
                    None if sample.metrics is None else output.num_prompt_tokens - sample.metrics.cached_tokens
                )
            ),
        ),
        "request_generation_tokens": ServerHistogram(
            "Tokens of a sample.", (), _of_each(lambda sample, *_: len(sample.token_ids))
        ),
        "request_max_num_generation_tokens": ServerHistogram(
            "Tokens of the longest sample of a prompt.",
            (),
            lambda output, _: [max(len(each.token_ids) for each in output.outputs)],
        ),
        "request_params_max_tokens": ServerHistogram(
            "max_tokens of a sample's request, if it is given.", (), _of_each(lambda _, __, params: params.max_tokens)
        ),
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
        self._histograms = {
            name: self._histogram(name, each.buckets) for name, each in HISTOGRAMS.items() if each.buckets
        }
        self._ended = prometheus_client.Counter(
            f"{prefix}:request_success", "Samples ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(model, _ENGINE, reason)

    def count_end(self, reason: str) -> None:
        """Count a sample that ended: stop, length, abort or error."""
        self._ended.labels(self._model, _ENGINE, reason).inc()

    def measure(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)

    def observe(self, output: RequestOutput, params: SamplingParams) -> None:
        """Measure a prompt's samples, all of which have ended."""
        self._add_sizes()
        for name, each in HISTOGRAMS.items():
            for value in () if each.read is None else each.read(output, params):
                if value is not None:
                    self.measure(name, value)

    def page(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its media type."""
        if self._read() is not None:
            self._add_sizes()
        page = generate_latest(self.registry)
        if self._prefix != _VLLM:
            page += b"".join(_under_vllm_prefix(page, self._prefix))
        return page, CONTENT_TYPE_LATEST

    def _add_sizes(self) -> None:
        """Add the histograms of tokens, whose buckets depend on the engine, if they are missing."""
        missing = HISTOGRAMS.keys() - self._histograms.keys()
        if missing:
            buckets = token_buckets(self._longest())
            self._histograms |= {name: self._histogram(name, buckets) for name in HISTOGRAMS if name in missing}

    def _histogram(self, name: str, buckets: Sequence[float]) -> prometheus_client.Histogram:
        text = HISTOGRAMS[name].text
        made = prometheus_client.Histogram(
            f"{self._prefix}:{name}", text, _LABELS, buckets=buckets, registry=self.registry
        )
        return made.labels(self._model, _ENGINE)


def joined(pages: Mapping[str, str]) -> str:
    """Return one page with the samples of all: the label `engine` is the name of their page.

    A sample without that label, which describes no engine, is that of the first page.
    """
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, (name, page) in enumerate(pages.items()):
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in described.setdefault(family, []):
                    described[family].append(line)
            elif _LABEL in line:
                samples.setdefault(family, []).append(line.replace(_LABEL, f'engine="{name}"'))
            elif number == 0:
                samples.setdefault(family, []).append(line)
    families = (line for family, about in described.items() for line in (*about, *samples.get(family, ())))
    return "".join(f"{line}\n" for line in families)


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
                self._metrics.measure(FIRST_TOKEN, now - self._started)
            else:
                self._metrics.measure(NEXT_TOKEN, now - last)
                self._metrics.measure(NEXT_TOKEN_BY_OLD_NAME, now - last)
            self._last[sample] = now
        if piece.finish_reason is not None:
            self._open -= 1
            self._metrics.count_end(piece.finish_reason)
            self._metrics.measure(REQUEST, now - self._started)
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

    @override
    def collect(self) -> Iterator[Metric]:
        totals = self._read() or EngineMetrics()
        for each in ENGINE_FIGURES:
            yield self._figure(each, getattr(totals, each.field))
        yield self._tokens_of_steps(totals)
        yield self._adapters()
        if (cache := self._read_cache()) is not None:
            names = sorted(cache)
            name = f"{self._prefix}:cache_config_info"
            family = GaugeMetricFamily(name, "The cache's settings, as labels.", labels=(*names, "engine"))
            family.add_metric([*(cache[each] for each in names), _ENGINE], 1)
            yield family

    def _figure(self, figure: EngineFigure, value: Any) -> Metric:
        labels = (*_LABELS, "position") if figure.kind is Vector else _LABELS
        family = _FAMILIES[figure.kind](f"{self._prefix}:{figure.name}", figure.text, labels=labels)
        for place, each in enumerate(value if figure.kind is Vector else [value]):
            family.add_metric([self._model, _ENGINE, str(place)][: len(labels)], each)
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
