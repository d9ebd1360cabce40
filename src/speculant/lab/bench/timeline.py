"""What an engine did when: the phases of its steps, without a profiler."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculant.engine.engine import Engine
from speculant.engine.profiling import unmarked
from speculant.errors import ConfigError, Converts


@dataclass(frozen=True)
class Span:
    """A phase of a step (`engine.profiling.PHASES`), in seconds of `time.perf_counter`."""

    phase: str
    start: float
    end: float


@contextmanager
def recorded(engine: Engine) -> Iterator[list[Span]]:
    """Record the phases of the steps inside this block; the list grows while it runs."""
    spans = list[Span]()

    @contextmanager
    def mark(phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            spans.append(Span(phase, started, time.perf_counter()))

    engine.mark = mark
    try:
        yield spans
    finally:
        engine.mark = unmarked


def chrome_trace(tracks: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Return a trace that Perfetto opens, with a row per track; each track begins at 0."""
    events = list[dict[str, Any]]()
    for row, (name, spans) in enumerate(tracks.items(), 1):
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}})
        begin = min((span.start for span in spans), default=0.0)
        events += [
            {
                "ph": "X",
                "name": span.phase,
                "cat": "step",
                "pid": 1,
                "tid": row,
                "ts": 1e6 * (span.start - begin),
                "dur": 1e6 * (span.end - span.start),
            }
            for span in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, tracks: Mapping[str, Sequence[Span]]) -> None:
    """Write `chrome_trace` as JSON; raises ConfigError if that is not possible."""
    with Converts(ConfigError, f"{path} can't be written", "name another file."):
        path.write_text(json.dumps(chrome_trace(tracks)), encoding="utf-8")
