"""Traces of requests that generate, for OpenTelemetry (extra `otel`): one span for a request, and below it its phases.

    llm_request  |----------------------------------------|
    queue          |---|                                      until the first step
    prompt             |-----|                                from there until the first token
    draft              |---|                                  these are sums over all steps of the request,
    target pass            |----------------------|           and each begins where the one above it ends
    verify                                        |--|

With an encoder-decoder model, a span `encode` comes before `draft`.

Spans are made when the response has ended, from the request's record. Of several prompts the phases are those of the
prompt with the most passes: prompts share passes, so their sums can't be added. Attributes have vLLM's names where it
has any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from speculant.errors import ConfigError
from speculant.metrics import RequestMetrics, SpeculationMetrics
from speculant.params import SamplingParams
from speculant.serving.access_log import REQUEST_ID, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

Value = str | int | float | bool
_PATH = "/v1/traces"  # of a collector, if the URL has none
_TIMEOUT = 3  # seconds for the collector to answer


class Phase(NamedTuple):
    """A part of a request. Times are readings of `time.perf_counter`, in seconds."""

    name: str
    started: float
    ended: float
    attributes: Mapping[str, Value]


class Tracer:
    """Makes the spans of requests. model: its name in the spans. processor: gets the spans."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "speculant"})  # OTEL_SERVICE_NAME replaces the name
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("speculant")
        self._propagator, self._model = TraceContextTextMapPropagator(), model

    @classmethod
    def to_collector(cls, url: str, model: str) -> Tracer:
        """Return a tracer whose spans go to a collector, in batches. Raises ConfigError without the extra `otel`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces need OpenTelemetry, which is not installed: {error}",
                'pip install -c constraints.txt "speculant[otel]", or leave out otlp_endpoint.',
            ) from error
        exporter: SpanExporter = OTLPSpanExporter(endpoint=traces_url(url), timeout=_TIMEOUT)
        return cls(BatchSpanProcessor(exporter), model)

    def __call__(self, scope: Scope, record: RequestRecord) -> None:
        """Report a request that has ended, if it generates."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if record.params is None:
            return
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        root = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(given),
            SpanKind.SERVER,
            {**_request(scope, record, record.params), **_figures(record), "gen_ai.response.model": self._model},
            start_time=record.time_ns,
        )
        if record.end in ("error", "aborted"):
            root.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(root)
        for phase in phases(record):
            start = _ns(record, phase.started)
            span = self._tracer.start_span(phase.name, inside, attributes=phase.attributes, start_time=start)
            span.end(_ns(record, phase.ended))
        root.end(_ns(record, record.finished))

    def close(self) -> None:
        """Send the spans that are left."""
        self._provider.shutdown()


def traces_url(url: str) -> str:
    """Return the URL for traces of a collector, whose own URL may have no path."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else parts._replace(path=_PATH).geturl()


def phases(record: RequestRecord) -> Iterator[Phase]:
    """Yield the phases that a request has come to the end of."""
    if not record.outputs:
        return
    metrics = _longest(record)
    timing, spec = metrics.timing, metrics.speculative_decoding
    if timing.started is None:
        return
    yield Phase("queue", timing.arrival, timing.started, {})
    if timing.first_token is not None:
        yield Phase("prompt", timing.started, timing.first_token, {"speculant.cached_tokens": metrics.cached_tokens})
    sums: tuple[tuple[str, float, Mapping[str, Value]], ...] = (
        ("draft", timing.draft_s, {"speculant.drafted_tokens": spec.num_draft_tokens}),
        ("target pass", timing.pass_s, {}),
        ("verify", timing.verify_s - timing.pass_s, {"speculant.accepted_tokens": spec.num_accepted_draft_tokens}),
    )
    encoding: tuple[tuple[str, float, Mapping[str, Value]], ...] = (("encode", timing.encode_s, {}),)
    begin = timing.started
    for name, seconds, attributes in (*(encoding if timing.encode_s else ()), *sums):
        yield Phase(name, begin, begin + seconds, {"speculant.passes": timing.target_passes, **attributes})
        begin += seconds


def _longest(record: RequestRecord) -> RequestMetrics:
    """Return the figures of the prompt with the most passes."""
    return max((output.metrics for output in record.outputs), key=lambda metrics: metrics.timing.target_passes)


def _request(scope: Scope, record: RequestRecord, params: SamplingParams) -> dict[str, Value]:
    """Return the attributes of a request and its response."""
    found: dict[str, Value] = {
        "gen_ai.request.id": scope.get(REQUEST_ID, ""),
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.response.status_code": record.status,
        "speculant.end": record.end,
    }
    return found if params.max_tokens is None else {**found, "gen_ai.request.max_tokens": params.max_tokens}


def _figures(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes of a request's tokens and times, in seconds."""
    found: dict[str, Value] = {"gen_ai.usage.completion_tokens": record.generated_tokens}
    found["gen_ai.latency.e2e"] = record.seconds
    if record.prompt_tokens is not None:
        found["gen_ai.usage.prompt_tokens"] = record.prompt_tokens
    if record.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = record.first_token - record.started
    if record.outputs:
        found["gen_ai.usage.num_sequences"] = sum(len(output.outputs) for output in record.outputs)
        spec = SpeculationMetrics.total(output.metrics.speculative_decoding for output in record.outputs)
        found["speculant.drafted_tokens"] = spec.num_draft_tokens
        found["speculant.accepted_tokens"] = spec.num_accepted_draft_tokens
        found["speculant.cached_tokens"] = sum(output.metrics.cached_tokens for output in record.outputs)
        found |= _latencies(_longest(record))
    return found


def _latencies(metrics: RequestMetrics) -> dict[str, Value]:
    timing = metrics.timing
    if timing.queue_s is None or timing.prompt_s is None:
        return {}
    return {
        "gen_ai.latency.time_in_queue": timing.queue_s,
        "gen_ai.latency.time_in_model_prefill": timing.prompt_s,
        "gen_ai.latency.time_in_model_decode": timing.decode_s,
        "gen_ai.latency.time_in_model_inference": timing.prompt_s + timing.decode_s,
    }


def _ns(record: RequestRecord, reading: float) -> int:
    """Return the time of a reading in nanoseconds since the epoch."""
    return record.time_ns + int((reading - record.started) * 1e9)
