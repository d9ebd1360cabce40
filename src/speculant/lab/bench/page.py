"""The report of a benchmark as one HTML file that needs no network: tables, charts, a timeline and coloured tokens."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from speculant import __version__
from speculant.errors import ConfigError, Converts
from speculant.lab.bench import charts
from speculant.lab.bench.history import machine
from speculant.lab.bench.measuring import ONE_AT_A_TIME, BenchCase
from speculant.lab.bench.report import conclusions, heading
from speculant.lab.bench.samples import Sample
from speculant.lab.bench.tables import SWEPT, interval

TEMPLATE = Path(__file__).parent / "page.html"
FIGURES = {
    "tokens_per_s": ("tokens/s", 1.0),
    "request_tokens_per_s": ("tokens/s of a request", 1.0),
    "ttft_s": ("first token (ms)", 1e3),
    "itl_mean_s": ("between tokens (ms)", 1e3),
    "burst_p50_s": ("between bursts (ms)", 1e3),
    "burst_tokens": ("tokens a burst", 1.0),
    "tokens_per_pass": ("tokens per pass", 1.0),
    "mean_acceptance_length": ("1 + accepted tokens of a draft", 1.0),
}
GAINS = {
    "measured_speed": "speed between tokens over plain",
    "predicted_speed": "the same by the formula",
    "cost_ratio": "a drafted token, in plain steps",
    "verification_ratio": "the verification, in plain steps",
    "best_length": "best length by the formula",
}


def page(value: Mapping[str, Any], cases: Sequence[BenchCase], samples: Sequence[Sequence[Sample]]) -> str:
    """Return the report of a benchmark.

    value: `lab.bench.report.document` of these cases. samples: of each case, one per mode. Raises ConfigError without
    matplotlib.
    """
    charts.require_charts()
    parts = zip(value["cases"], cases, samples, strict=True)
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        value=value,
        cases=[_case(*part) for part in parts],
        environment=environment(value),
        command=shlex.join(["speculant", *sys.argv[1:]]),
        settings=json.dumps(value["engine"], indent=2),
    )


def environment(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions, the machine and the models of the measurement."""
    memory, where = value["memory"], machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "speculant": __version__,
        "torch": where["torch"],
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": where["processor"],
        "threads": str(where["threads"]),
        "model": str(value["engine"]["model"]),
        "speculation": value["speculation"]["detail"],
        "memory of a draft model": (
            f"{memory['parameters_share']:.3g} of the target's parameters, {memory['cache_share']:.3g} of its cache"
        ),
    }


def _case(figures: Mapping[str, Any], case: BenchCase, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "heading": heading(figures),
        "conclusions": list(conclusions(figures)),
        "modes": [name.replace("_", " ") for name in figures["runs"]],
        "drafting": [name.replace("_", " ") for name in figures["gains"]],
        "rows": [_row(figures["runs"], figure) for figure in FIGURES] + _gains(figures),
        "categories": _categories(figures),
        "charts": _charts(figures, case, samples),
        "samples": [each for each in samples if each.drafts and not each.mode.endswith(ONE_AT_A_TIME)],
    }


def _gains(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the gains from drafting in each mode; plain modes have none."""
    if not figures["gains"]:
        return []
    own = [figures["gains"].get(mode, {}) for mode in figures["runs"]]
    rates = ["acceptance rate (95%)", *(interval(each.get("acceptance_rate")) for each in own)]
    others = [
        [label, *("-" if name not in each else _spread(each[name], 1.0) for each in own)]
        for name, label in GAINS.items()
    ]
    return [others[0], *_predictions(figures), others[1], rates, *others[2:]]


def _predictions(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the row of the predictions of a sweep; the first mode is plain decoding."""
    if SWEPT not in figures:
        return []
    return [["predicted before the runs", "-", *(f"{row['predicted_speed']:.4g}" for row in figures[SWEPT])]]


def _categories(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each category: its prompts, and by way the speed over plain decoding and the acceptance."""
    return [
        [name, str(each["prompts"]), *(_category(each["modes"][way]) for way in figures["gains"])]
        for name, each in figures["categories"].items()
    ]


def _category(mode: Mapping[str, Any]) -> str:
    speed, rate = mode.get("speed"), mode["acceptance_rate"]
    return f"{_spread(speed, 1.0) if speed else '-'}; {interval(rate)}"


def _row(runs: Mapping[str, Any], figure: str) -> list[str]:
    label, scale = FIGURES[figure]
    spreads = [run.get(figure) for run in runs.values()]
    return [label, *("-" if each is None else _spread(each, scale) for each in spreads)]


def _spread(each: Mapping[str, float], scale: float) -> str:
    low, middle, high = (f"{scale * each[name]:.4g}" for name in ("q1", "median", "q3"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _charts(figures: Mapping[str, Any], case: BenchCase, samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Return titles and charts; charts of drafts are left out if there were no drafts or if none are shown."""
    found = [("Speed", charts.speeds(figures["runs"]))]
    if SWEPT in figures:
        found.append(("Speed by draft length", charts.speed_by_length(figures[SWEPT])))
    elif gains := {
        mode: gain for mode, gain in figures["gains"].items() if {"predicted_speed", "measured_speed"} <= {*gain}
    }:
        found.append(("Predicted and measured speed", charts.predicted_and_measured(gains)))
    for sample in samples:
        metrics, name = case.runs[sample.mode][0].speculation, sample.mode.replace("_", " ")
        if metrics.num_tested_tokens:
            found += [
                (f"Acceptance per position, {name}", charts.acceptance_by_position(metrics)),
                (f"Accepted tokens per draft, {name}", charts.accepted_per_draft(metrics)),
            ]
    found.append(("Steps of a run", charts.timeline({sample.mode: sample.spans for sample in samples})))
    return found


def write_page(
    path: Path, value: Mapping[str, Any], cases: Sequence[BenchCase], samples: Sequence[Sequence[Sample]]
) -> None:
    """Write `page`; raises ConfigError if that is not possible."""
    text = page(value, cases, samples)
    with Converts(ConfigError, f"{path} can't be written", "name another file."):
        path.write_text(text, encoding="utf-8")
