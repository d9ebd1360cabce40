"""The charts of a report as SVG, by matplotlib (the extra `bench`)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from speculant.engine import PHASES
from speculant.errors import ConfigError
from speculant.lab.bench.samples import Span
from speculant.lab.theory import accepted_lengths, survival
from speculant.metrics import SpeculationMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def speeds(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Draw tokens per second by mode, with quartiles. runs: of a report's case."""
    axes = _axes("tokens/s")
    middle, errors = _with_errors([run["tokens_per_s"] for run in runs.values()])
    axes.barh(_labels(runs), middle, xerr=errors, color="#4c8bd6", ecolor="#333333", capsize=4, height=0.5)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s, median and quartiles", ylabel="")
    return _svg(axes)


def acceptance_by_position(metrics: SpeculationMetrics) -> str:
    """Draw the share of accepted tokens by position in the draft, of those tested there."""
    rates = metrics.acceptance_by_position
    axes = _axes("accepted / tested")
    axes.bar(range(1, len(rates) + 1), rates, color="#5aa469")
    axes.axhline(metrics.acceptance_rate, color="#333333", linestyle="--", linewidth=1, label="all positions")
    axes.set(xlabel="position in the draft", ylim=(0, 1), xticks=range(1, len(rates) + 1))
    axes.legend(loc="lower left")
    return _svg(axes)


def accepted_per_draft(metrics: SpeculationMetrics) -> str:
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


def predicted_and_measured(gains: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
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


def speed_by_length(rows: Sequence[Mapping[str, Any]]) -> str:
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
