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
import torch

from speculant import __version__
from speculant.bench import charts
from speculant.bench.measuring import PLAIN, SPECULATIVE, Case
from speculant.bench.report import conclusions, heading
from speculant.bench.samples import Sample
from speculant.errors import ConfigError, Converts

TEMPLATE = Path(__file__).parent / "page.html"
FIGURES = {
    "tokens_per_s": ("tokens/s", 1.0),
    "request_tokens_per_s": ("tokens/s of a request", 1.0),
    "ttft_s": ("first token (ms)", 1e3),
    "itl_mean_s": ("between tokens (ms)", 1e3),
    "burst_p50_s": ("between bursts (ms)", 1e3),
    "burst_tokens": ("tokens a burst", 1.0),
    "mean_acceptance_length": ("tokens a draft commits", 1.0),
}


def page(value: Mapping[str, Any], cases: Sequence[Case], samples: Sequence[Sequence[Sample]]) -> str:
    """Return the report of a benchmark.

    value: `bench.report.document` of these cases. samples: of each case, one per mode. Raises ConfigError without
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
    """Return what the figures were measured with."""
    memory = value["memory"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "speculant": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
        "model": str(value["engine"]["model"]),
        "speculation": value["speculation"]["detail"],
        "memory of a draft model": (
            f"{memory['parameters_share']:.3g} of the target's parameters, {memory['cache_share']:.3g} of its cache"
        ),
    }


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _case(told: Mapping[str, Any], case: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "heading": heading(told),
        "conclusions": list(conclusions(told)),
        "modes": [name.replace("_", " ") for name in told["runs"]],
        "rows": [_row(told["runs"], figure) for figure in FIGURES],
        "charts": _charts(told, case, samples),
        "samples": samples,
    }


def _row(runs: Mapping[str, Any], figure: str) -> list[str]:
    label, scale = FIGURES[figure]
    spreads = [run.get(figure) for run in runs.values()]
    return [label, *("-" if each is None else _spread(each, scale) for each in spreads)]


def _spread(each: Mapping[str, float], scale: float) -> str:
    low, middle, high = (f"{scale * each[name]:.4g}" for name in ("q1", "median", "q3"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _charts(told: Mapping[str, Any], case: Case, samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Return titles and charts; those of drafts are left out if there were none."""
    found = [("Speed", charts.speeds(told["runs"]))]
    for mode, gain in told["gains"].items():
        if gain["acceptance_rate"] is None or "predicted_speed" not in gain:
            continue
        metrics, name = case.runs[mode][0].speculation, mode.replace("_", " ")
        measured = case.ratios(mode.replace(SPECULATIVE, PLAIN), mode)["itl_mean_s"]
        spread = {"q1": measured.q1, "median": measured.median, "q3": measured.q3}
        found += [
            (f"Acceptance per position, {name}", charts.acceptance_by_position(metrics)),
            (f"Accepted tokens per draft, {name}", charts.accepted_per_draft(metrics)),
            (f"Predicted and measured speed, {name}", charts.predicted_and_measured(gain["predicted_speed"], spread)),
        ]
    found.append(("Steps of a run", charts.timeline({sample.mode: sample.spans for sample in samples})))
    return found


def write_page(
    path: Path, value: Mapping[str, Any], cases: Sequence[Case], samples: Sequence[Sequence[Sample]]
) -> None:
    """Write `page`; raises ConfigError if that is not possible."""
    text = page(value, cases, samples)
    with Converts(ConfigError, f"{path} can't be written", "name another file."):
        path.write_text(text, encoding="utf-8")
