"""The report of a benchmark as one HTML file that needs no network: tables, charts, a timeline and coloured tokens."""

from __future__ import annotations

import importlib
import io
import json
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2
import numpy as np

from speculant import __version__
from speculant.engine import PHASES, Engine, unmarked
from speculant.errors import ConfigError, Converts
from speculant.lab.bench.history import origin
from speculant.lab.bench.measuring import ONE_AT_A_TIME, Bench, BenchCase, Way
from speculant.lab.bench.report import (
    GAPS,
    SPEED,
    STEP_ROWS,
    SWEPT,
    Row,
    category_table,
    conclusions,
    figure_lines,
    heading,
    interval,
)
from speculant.lab.bench.workloads import Workload
from speculant.lab.theory import accepted_lengths, survival
from speculant.metrics import SpeculationMetrics
from speculant.text import IncrementalDetokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


COLOURS = dict(zip(PHASES, ("#bbbbbb", "#4c8bd6", "#7b52a8", "#d98f2b", "#5aa469"), strict=True))
SIZE = (5.4, 2.8)  # inches
SHOWN_STEPS = 12  # of the timeline


def require_charts() -> None:
    """Raise ConfigError if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "a report has charts, which matplotlib draws, and it is not installed",
            'run: pip install -c constraints.txt "speculant[bench]"',
        ) from error


def speed_chart(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Draw tokens per second by mode, with quartiles. runs: of a report's case."""
    axes = _axes("tokens/s")
    middle, errors = _with_errors([run["tokens_per_s"] for run in runs.values()])
    axes.barh(_labels(runs), middle, xerr=errors, color="#4c8bd6", ecolor="#333333", capsize=4, height=0.5)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s, median and quartiles", ylabel="")
    return _svg(axes)


def position_chart(metrics: SpeculationMetrics) -> str:
    """Draw the share of accepted tokens by position in the draft, of those tested there."""
    rates = metrics.acceptance_by_position
    axes = _axes("accepted / tested")
    axes.bar(range(1, len(rates) + 1), rates, color="#5aa469")
    axes.axhline(metrics.acceptance_rate, color="#333333", linestyle="--", linewidth=1, label="all positions")
    axes.set(xlabel="position in the draft", ylim=(0, 1), xticks=range(1, len(rates) + 1))
    axes.legend(loc="lower left")
    return _svg(axes)


def draft_chart(metrics: SpeculationMetrics) -> str:
    """Draw the numbers of accepted tokens of a draft, beside the distribution for independent tokens of one rate."""
    lengths = np.bincount(metrics.per_step_drafted)
    counts = np.bincount(metrics.per_step_accepted, minlength=len(lengths))
    expected = np.zeros(len(lengths))
    for length in np.flatnonzero(lengths):
        share = accepted_lengths(survival(metrics.acceptance_rate, int(length)))
        expected[: length + 1] += lengths[length] * share
    axes = _axes("drafts")
    axes.bar(range(len(counts)), counts, color="#4c8bd6", label="measured")
    axes.plot(range(len(expected)), expected, "o--", color="#333333", linewidth=1, label="independent, one rate")
    axes.set(xlabel="accepted tokens", xticks=range(len(counts)))
    axes.legend()
    return _svg(axes)


def prediction_chart(gains: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Draw the predicted and the measured speed between tokens over plain decoding by mode, with quartiles.

    gains: of a report's case, by mode.
    """
    axes = _axes("")
    for place, kind in enumerate(("predicted", "measured")):
        spreads = [gain[f"{kind}_speed"] for gain in gains.values()]
        rows = np.arange(len(spreads)) + 0.4 * place - 0.2
        middle, errors = _with_errors(spreads)
        colour = ("#bbbbbb", "#4c8bd6")[place]
        axes.barh(rows, middle, xerr=errors, color=colour, ecolor="#333333", capsize=3, height=0.38, label=kind)
    axes.set(yticks=range(len(gains)), yticklabels=_labels(gains), xlabel="speed over plain decoding")
    axes.axvline(1.0, color="#333333", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.legend()
    return _svg(axes)


def length_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the predicted and the measured speed between tokens over plain decoding by length, with quartiles.

    rows: of a sweep's case.
    """
    axes, lengths = _axes("speed over plain decoding"), [row["length"] for row in rows]
    middle, errors = _with_errors([row["measured_speed"] for row in rows])
    axes.errorbar(
        lengths, middle, yerr=errors, fmt="o-", color="#4c8bd6", ecolor="#333333", capsize=3, label="measured"
    )
    predicted = [row["predicted_speed"] for row in rows]
    axes.plot(lengths, predicted, "s--", color="#777777", linewidth=1, markersize=4, label="predicted")
    axes.axhline(1.0, color="#333333", linestyle="--", linewidth=1)
    axes.set(xlabel="drafted tokens", xticks=lengths)
    axes.legend()
    return _svg(axes)


def _with_errors(spreads: Sequence[Mapping[str, float]]) -> tuple[Any, Any]:
    """Return medians [n], and the distances of the quartiles below and above them [2, n]."""
    middle = np.array([each["median"] for each in spreads])
    return middle, np.array([[each["median"] - each["q1"], each["q3"] - each["median"]] for each in spreads]).T


def _labels(names: Iterable[str]) -> list[str]:
    return [name.replace("_", " ").replace(", ", "\n") for name in names]


def timeline(tracks: Mapping[str, Sequence[Span]]) -> str:
    """Draw the phases of the first steps after the prompt, a row per mode (arXiv 2211.17192, figure 5)."""
    axes = _axes("")
    for row, spans in enumerate(tracks.values()):
        shown = _first_steps(spans)
        begin = shown[0].start if shown else 0.0
        for phase, colour in COLOURS.items():
            bars = [(1e3 * (s.start - begin), 1e3 * (s.end - s.start)) for s in shown if s.phase == phase]
            axes.broken_barh(bars, (row - 0.3, 0.6), facecolors=colour, label=None if row else phase)
    axes.set(xlabel="ms", yticks=range(len(tracks)), yticklabels=_labels(tracks))
    axes.invert_yaxis()
    axes.legend(ncols=len(COLOURS), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.18), frameon=False)
    return _svg(axes)


def _first_steps(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of SHOWN_STEPS steps, from the third on: the prompt and the first draft take longer."""
    starts = [index for index, span in enumerate(spans) if span.phase == PHASES[0]]
    chosen = starts[2 : SHOWN_STEPS + 3] or starts
    return list(spans[chosen[0] : chosen[-1]]) if len(chosen) > 1 else list(spans)


def _axes(label: str) -> Axes:
    require_charts()
    from matplotlib.figure import Figure

    axes = Figure(figsize=SIZE, layout="constrained").subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel(label)
    return axes


def _svg(axes: Axes) -> str:
    """Return the figure as an SVG element."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        cast("Figure", axes.figure).savefig(text, format="svg", metadata={"Date": None})
    return "".join(text.getvalue().partition("<svg")[1:])


TEMPLATE = Path(__file__).parent / "page.html"
FIGURES = (*SPEED, GAPS[0], *GAPS[4:], *STEP_ROWS[2:])
GAINS = (
    Row("measured_speed", "speed between tokens over plain"),
    Row("predicted_speed", "the same by the formula"),
    Row("cost_ratio", "a drafted token, in plain steps"),
    Row("verification_ratio", "the verification, in plain steps"),
    Row("best_length", "best length by the formula", whole=True),
)


def render(value: Mapping[str, Any], cases: Sequence[BenchCase], samples: Sequence[Sequence[Sample]]) -> str:
    """Return the report of a benchmark.

    value: `lab.bench.report.document` of these cases. samples: of each case, one per mode. Raises ConfigError without
    matplotlib.
    """
    require_charts()
    parts = zip(value["cases"], cases, samples, strict=True)
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        value=value,
        cases=[_case(*part) for part in parts],
        environment=environment(value),
        settings=json.dumps(value["engine"], indent=2),
    )


def environment(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions, the machine, the models and the command of the measurement."""
    memory, made = value["memory"], origin(["speculant"])
    return {
        "date": made["date"],
        "speculant": __version__,
        **made["versions"],
        "system": platform.platform(),
        **made["machine"],
        "model": str(value["engine"]["model"]),
        "speculation": value["speculation"]["detail"],
        "memory of a draft model": (
            f"{memory['parameters_share']:.3g} of the target's parameters, {memory['cache_share']:.3g} of its cache"
        ),
        "command": made["command"],
    }


def _case(figures: Mapping[str, Any], case: BenchCase, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "heading": heading(figures),
        "conclusions": list(conclusions(figures)),
        "modes": [name.replace("_", " ") for name in figures["runs"]],
        "rows": figure_lines(FIGURES, list(figures["runs"].values())) + _gains(figures),
        "categories": category_table(figures) if figures["categories"] else None,
        "charts": _charts(figures, case, samples),
        "samples": [each for each in samples if each.drafts and not each.mode.endswith(ONE_AT_A_TIME)],
    }


def _gains(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the gains from drafting in each mode; plain modes have none."""
    if not figures["gains"]:
        return []
    own = [figures["gains"].get(mode, {}) for mode in figures["runs"]]
    rates = ["acceptance rate (95%)", *(interval(each.get("acceptance_rate")) for each in own)]
    speed, *others = figure_lines(GAINS, own)
    swept = figures.get(SWEPT, ())  # the first mode is plain decoding
    predicted = ["predicted before the runs", "-", *(f"{row['predicted_speed']:.2f}" for row in swept)]
    return [speed, *([predicted] if swept else []), others[0], rates, *others[1:]]


def _charts(figures: Mapping[str, Any], case: BenchCase, samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Return titles and charts; charts of drafts are left out if there were no drafts or if none are shown."""
    found = [("Speed", speed_chart(figures["runs"]))]
    if SWEPT in figures:
        found.append(("Speed by draft length", length_chart(figures[SWEPT])))
    elif gains := {
        mode: gain for mode, gain in figures["gains"].items() if {"predicted_speed", "measured_speed"} <= {*gain}
    }:
        found.append(("Predicted and measured speed", prediction_chart(gains)))
    for sample in samples:
        metrics, name = case.runs[sample.mode][0].speculation, sample.mode.replace("_", " ")
        if metrics.num_tested_tokens:
            found += [
                (f"Acceptance per position, {name}", position_chart(metrics)),
                (f"Accepted tokens per draft, {name}", draft_chart(metrics)),
            ]
    found.append(("Steps of a run", timeline({sample.mode: sample.spans for sample in samples})))
    return found


def write_page(
    path: Path, value: Mapping[str, Any], cases: Sequence[BenchCase], samples: Sequence[Sequence[Sample]]
) -> None:
    """Write `render`; raises ConfigError if that is not possible."""
    text = render(value, cases, samples)
    with Converts(ConfigError, f"{path} can't be written", "name another file."):
        path.write_text(text, encoding="utf-8")
