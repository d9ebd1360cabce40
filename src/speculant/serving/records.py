"""Records of requests, and what is made of them when the response has ended: a line of the access log, and a trace.

The routes count in a record only if the access log or traces are switched on.

A line has no key, no text of a prompt or an answer, and no query. Fields that a client chooses are bounded. In the form
"text" they have no blanks, quotes or control characters, so that nobody can forge a line or a field.

A trace (for OpenTelemetry, extra `otel`) is one span for a request that generates, and below it its phases.

    llm_request  |----------------------------------------|
    queue          |---|                                      until the first step
    prompt             |-----|                                from there until the first token
    draft              |---|                                  these are sums over all steps of the request,
    target pass            |----------------------|           and each begins where the one above it ends
    verify                                        |--|

With an encoder-decoder model, a span `encode` comes before `draft`. Of several prompts the phases are those of the
prompt with the most passes: prompts share passes, so their sums can't be added. Attributes have vLLM's names where it
has any.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculant.engine import StreamPiece
from speculant.errors import ConfigError
from speculant.metrics import RequestMetrics, SpeculationMetrics
from speculant.params import SamplingParams
from speculant.serving.http.clients import client_of
from speculant.serving.wire import RECORD, REQUEST_ID, request_id_headers
from speculant.types import RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request. Times are readings of `time.perf_counter`, in seconds.

    time_ns: the time of `started`, since the epoch. params: set for a request that generates. outputs: the results of
    the prompts that came to their end. sent: bytes of the response's body. end: why the response ended: complete,
    disconnected (by the client), unread (by a slow client), aborted (cancelled by the server) or error; empty = it has
    not ended. parts: how many have to end, see `part_ended`: the response, and a generation that goes on in the
    background.
    """

    started: float = field(default_factory=time.perf_counter)
    time_ns: int = field(default_factory=time.time_ns)
    params: SamplingParams | None = None
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    accepted_tokens: int = 0
    first_token: float | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    status: int = 0
    sent: int = 0
    finished: float = 0.0
    end: str = ""
    is_whole: bool = False
    parts: int = 1
    report: Callable[[], None] = lambda: None

    def part_ended(self) -> None:
        """Count a part that has ended; after the last one the record is complete, and reported."""
        self.parts -= 1
        if not self.parts:
            self.finish()
            self.report()

    def count(self, piece: StreamPiece, now: float) -> None:
        """Count a piece that arrived at `now`."""
        if piece.token is not None:
            if self.first_token is None:
                self.first_token = now
            self.generated_tokens += 1
            self.accepted_tokens += piece.drafted
        if piece.output is not None:
            self.outputs.append(piece.output)

    def note(self, message: Message) -> None:
        """Count a message of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)

    def finish(self) -> None:
        """Note that the response has ended."""
        self.finished = time.perf_counter()
        if self.end == "error" and 400 <= self.status < 500:  # it is refused, which is no failure
            self.end = "complete"
        if self.end:
            return
        if not self.is_whole:
            self.end = "disconnected"
        else:
            self.end = "complete" if self.status < 500 else "error"

    @property
    def seconds(self) -> float:
        """Time from the request to the end of its response."""
        return self.finished - self.started


Report = Callable[[Scope, RequestRecord], None]


_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestRecords:
    """Gives each request and its response an X-Request-Id: the client's, or one made by the server.

    It keeps a record of each request, and reports it when the response and its generation have ended.
    """

    def __init__(self, app: ASGIApp, reports: Sequence[Report] = ()) -> None:
        self._app, self._reports = app, reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = scope[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(report=lambda: self._report(scope, record))
        if self._reports:
            scope[RECORD] = record

        async def send_noted(message: Message) -> None:
            record.note(message)
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict.fromkeys(request_id_headers(scope), request_id))
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            record.end = "aborted"
            raise
        except Exception:
            record.status, record.end = record.status or 500, "error"  # an outer layer answers
            raise
        finally:
            record.part_ended()

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        for report in self._reports:
            report(scope, record)


def note_background(scope: Scope, task: asyncio.Task[None]) -> None:
    """Report the request, if it has a record, no sooner than this task has ended."""
    record: RequestRecord | None = scope.get(RECORD)
    if record is not None:
        record.parts += 1
        task.add_done_callback(lambda _: record.part_ended())


logger = logging.getLogger("speculant.serving.access_log")  # users configure it by this name

_MOST_PATH, _MOST_METHOD = 200, 16  # characters that are logged
_DIGEST = 8  # characters of a key's digest: enough to tell clients apart, too few to test guesses of a key
_UNSAFE = re.compile(r'[^\x21-\x7e]|["\\]')


class AccessLog:
    """Writes the lines. form: "text" or "json"."""

    def __init__(self, form: str, write: Callable[[str], object] = logger.info) -> None:
        self._line, self._write = FORMS[form], write

    def __call__(self, scope: Scope, record: RequestRecord) -> None:
        """Write the line of a request that has ended."""
        self._write(self._line(_fields(scope, record)))


def _fields(scope: Scope, record: RequestRecord) -> dict[str, Any]:
    """Return a line's fields; None = there is no such figure."""
    first, generates = record.first_token, record.params is not None
    return {
        "time": datetime.fromtimestamp(record.time_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "client": _client(scope),
        "method": _bounded(scope["method"], _MOST_METHOD),
        "path": _bounded((scope.get("raw_path") or b"").decode("latin-1"), _MOST_PATH),
        "status": record.status or None,
        "bytes": record.sent,
        "seconds": round(record.seconds, 4),
        "first_token_seconds": None if first is None else round(first - record.started, 4),
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens if generates else None,
        "accepted_tokens": record.accepted_tokens if generates else None,
        "end": record.end,
        "request_id": scope.get(REQUEST_ID),
    }


def _client(scope: Scope) -> str:
    """Return the client's address, or the beginnings of the digests of its key and its user."""
    kind, _, name = client_of(scope).partition(":")
    if kind == "address":
        return name
    return "/".join(part[: part.index(":") + 1 + _DIGEST] for part in client_of(scope).split("/"))


def _bounded(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _text(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_plain(value)}" for name, value in fields.items())


def _plain(value: Any) -> str:
    """Return a value without blanks, quotes and control characters; they are written as in URLs."""
    if value is None or value == "":
        return "-"
    return _UNSAFE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), str(value))


FORMS: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType({"text": _text, "json": json.dumps})


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
            {**_attributes(scope, record, record.params), "gen_ai.response.model": self._model},
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
    sums: list[tuple[str, float, Mapping[str, Value]]] = [
        ("draft", timing.draft_s, {"speculant.drafted_tokens": spec.num_draft_tokens}),
        ("target pass", timing.pass_s, {}),
        ("verify", timing.verify_s - timing.pass_s, {"speculant.accepted_tokens": spec.num_accepted_draft_tokens}),
    ]
    if timing.encode_s:
        sums.insert(0, ("encode", timing.encode_s, {}))
    begin = timing.started
    for name, seconds, attributes in sums:
        yield Phase(name, begin, begin + seconds, {"speculant.passes": timing.target_passes, **attributes})
        begin += seconds


def _longest(record: RequestRecord) -> RequestMetrics:
    """Return the figures of the prompt with the most passes."""
    return max((output.metrics for output in record.outputs), key=lambda metrics: metrics.timing.target_passes)


def _attributes(scope: Scope, record: RequestRecord, params: SamplingParams) -> dict[str, Value]:
    """Return the attributes of a request and its response; times are in seconds."""
    first = record.first_token
    found: dict[str, Value | None] = {
        "gen_ai.request.id": scope.get(REQUEST_ID, ""),
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.response.status_code": record.status,
        "speculant.end": record.end,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.generated_tokens,
        "gen_ai.latency.e2e": record.seconds,
        "gen_ai.latency.time_to_first_token": None if first is None else first - record.started,
        **(_figures(record) if record.outputs else {}),
    }
    return {name: value for name, value in found.items() if value is not None}


def _figures(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes of the prompts that came to their end, and the phases of the longest."""
    timing = _longest(record).timing
    spec = SpeculationMetrics.total(output.metrics.speculative_decoding for output in record.outputs)
    found: dict[str, Value] = {
        "gen_ai.usage.num_sequences": sum(len(output.outputs) for output in record.outputs),
        "speculant.drafted_tokens": spec.num_draft_tokens,
        "speculant.accepted_tokens": spec.num_accepted_draft_tokens,
        "speculant.cached_tokens": sum(output.metrics.cached_tokens for output in record.outputs),
    }
    if timing.queue_s is not None and timing.prompt_s is not None:
        found |= {
            "gen_ai.latency.time_in_queue": timing.queue_s,
            "gen_ai.latency.time_in_model_prefill": timing.prompt_s,
            "gen_ai.latency.time_in_model_decode": timing.decode_s,
            "gen_ai.latency.time_in_model_inference": timing.prompt_s + timing.decode_s,
        }
    return found


def _ns(record: RequestRecord, reading: float) -> int:
    """Return the time of a reading in nanoseconds since the epoch."""
    return record.time_ns + int((reading - record.started) * 1e9)
