"""One prompt per way with everything recorded: the phases of its steps, without a profiler, and each token's origin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speculant.engine import Engine, unmarked
from speculant.errors import ConfigError, Converts
from speculant.lab.bench.measuring import Way
from speculant.lab.bench.runs import Bench
from speculant.lab.bench.workloads import Workload
from speculant.text import IncrementalDetokenizer

NO_TEXT = "\ufffd"  # shown for a rejected token without one
LINE_END = "\u21b5"  # shown for a rejected line's end


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


@dataclass(frozen=True)
class SamplePiece:
    """The text of a token, and whether it was drafted.

    burst: the number of the step that committed it, from 0. rejected: the texts of draft tokens that were rejected in
    its place.
    """

    text: str
    drafted: bool
    burst: int
    rejected: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """The token's origin: accepted, corrected, or plain if no draft token was tested in its place."""
        return "accepted" if self.drafted else "corrected" if self.rejected else "plain"


@dataclass(frozen=True)
class Sample:
    """A run of one prompt; `pieces` are its output."""

    mode: str
    prompt: str
    pieces: Sequence[SamplePiece]
    spans: Sequence[Span]

    @property
    def drafts(self) -> bool:
        """Whether anything was drafted."""
        return any(piece.kind != "plain" for piece in self.pieces)


def take_samples(workload: Workload, ways: Mapping[str, Way]) -> list[Sample]:
    """Run the first prompt once in each way, apart from the measured runs."""
    return [_take(name, way, workload.first(1)) for name, way in ways.items()]


def _take(name: str, way: Way, workload: Workload) -> Sample:
    runtime = way.bench.runtime
    with recorded(runtime.engine) as spans:
        run = Bench(runtime, f"sample-{name}").run(workload, way.mode)
    detokenizer = IncrementalDetokenizer(runtime.tokenizer, skip_special_tokens=False)
    bursts = [0]
    for gap in run.timings[0].gaps:
        bursts.append(bursts[-1] + (gap > 0))
    pieces = list[SamplePiece]()
    for token, drafted, burst, rejected in zip(run.outputs[0], run.drafted[0], bursts, run.rejected[0], strict=True):
        texts = [_text_of(each, detokenizer) for each in rejected]
        pieces.append(SamplePiece(detokenizer.push(token), drafted, burst, texts))
    pieces[-1] = replace(pieces[-1], text=pieces[-1].text + detokenizer.flush())
    return Sample(name, runtime.tokenizer.decode(list(workload.prompts[0])), pieces, list(spans))


def _text_of(token: int, detokenizer: IncrementalDetokenizer) -> str:
    """Return the text that a token would have had in this place."""
    state = detokenizer.checkpoint()
    text = detokenizer.push(token) + detokenizer.flush()
    detokenizer.restore(state)
    return text.replace("\n", LINE_END) or NO_TEXT


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
