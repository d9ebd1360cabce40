"""One prompt per way with everything recorded: the phases of its steps, and where each token comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from speculant.lab.bench.measuring import Way
from speculant.lab.bench.runs import Bench
from speculant.lab.bench.timeline import Span, recorded
from speculant.lab.bench.workloads import Workload
from speculant.text.detokenize import IncrementalDetokenizer

NO_TEXT = "\ufffd"  # shown for a rejected token without one
LINE_END = "\u21b5"  # shown for a rejected line's end


@dataclass(frozen=True)
class Piece:
    """The text of a token, and whether it was drafted.

    burst: which step committed it, counted from 0. rejected: the texts of draft tokens that were tested in its place
    and rejected.
    """

    text: str
    drafted: bool
    burst: int
    rejected: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """Where the token comes from: accepted, corrected, or plain, which no draft token stood in the place of."""
        return "accepted" if self.drafted else "corrected" if self.rejected else "plain"


@dataclass(frozen=True)
class Sample:
    """A run of one prompt; `pieces` are its output."""

    mode: str
    prompt: str
    pieces: Sequence[Piece]
    spans: Sequence[Span]

    @property
    def drafts(self) -> bool:
        """Whether anything was drafted."""
        return any(piece.kind != "plain" for piece in self.pieces)


def take_samples(workload: Workload, ways: Mapping[str, Way]) -> list[Sample]:
    """Run the first prompt once in each way, beside what is measured."""
    return [_take(name, way, workload.first(1)) for name, way in ways.items()]


def _take(name: str, way: Way, workload: Workload) -> Sample:
    runtime = way.bench.runtime
    with recorded(runtime.engine) as spans:
        run = Bench(runtime, f"sample-{name}").run(workload, way.mode)
    detokenizer = IncrementalDetokenizer(runtime.tokenizer, skip_special_tokens=False)
    bursts = [0]
    for gap in run.timings[0].gaps:
        bursts.append(bursts[-1] + (gap > 0))
    pieces = list[Piece]()
    for token, drafted, burst, rejected in zip(run.outputs[0], run.drafted[0], bursts, run.rejected[0], strict=True):
        texts = [_text_of(each, detokenizer) for each in rejected]
        pieces.append(Piece(detokenizer.push(token), drafted, burst, texts))
    pieces[-1] = replace(pieces[-1], text=pieces[-1].text + detokenizer.flush())
    return Sample(name, runtime.tokenizer.decode(list(workload.prompts[0])), pieces, list(spans))


def _text_of(token: int, detokenizer: IncrementalDetokenizer) -> str:
    """Return the text that a token would have had in this place."""
    state = detokenizer.checkpoint()
    text = detokenizer.push(token) + detokenizer.flush()
    detokenizer.restore(state)
    return text.replace("\n", LINE_END) or NO_TEXT
