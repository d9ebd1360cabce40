"""One prompt per mode with everything recorded: the phases of its steps, and which tokens were drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from speculant.bench.runs import Bench, Mode
from speculant.bench.timeline import Span, recorded
from speculant.bench.workloads import Workload
from speculant.engine.build import Runtime
from speculant.text.detokenize import IncrementalDetokenizer


@dataclass(frozen=True)
class Piece:
    """The text of a token, and whether it was drafted. `burst`: which step committed it, counted from 0."""

    text: str
    drafted: bool
    burst: int


@dataclass(frozen=True)
class Sample:
    """A run of one prompt; `pieces` are its output."""

    mode: str
    prompt: str
    pieces: Sequence[Piece]
    spans: Sequence[Span]


def take_samples(runtime: Runtime, workload: Workload, modes: Mapping[str, Mode]) -> list[Sample]:
    """Run the first prompt once in each mode, beside what is measured."""
    first = replace(workload, prompts=workload.prompts[:1], arrivals=[0.0])
    return [_take(runtime, first, name, mode) for name, mode in modes.items()]


def _take(runtime: Runtime, workload: Workload, name: str, mode: Mode) -> Sample:
    with recorded(runtime.engine) as spans:
        run = Bench(runtime, f"sample-{name}").run(workload, mode)
    detokenizer = IncrementalDetokenizer(runtime.tokenizer, skip_special_tokens=False)
    bursts = [0]
    for gap in run.timings[0].gaps:
        bursts.append(bursts[-1] + (gap > 0))
    texts = [detokenizer.push(token) for token in run.outputs[0]]
    texts[-1] += detokenizer.flush()
    pieces = [Piece(*each) for each in zip(texts, run.drafted[0], bursts, strict=True)]
    return Sample(name, runtime.tokenizer.decode(list(workload.prompts[0])), pieces, list(spans))
