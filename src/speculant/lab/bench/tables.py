"""The tables of benchmarks, made from the plain values of their documents (`lab/bench/report.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from speculant.lab.bench.measuring import ONE_AT_A_TIME, PLAIN, SPECULATIVE

SWEPT = "lengths"  # the key of a sweep's lengths in its cases
HIGHLIGHT = "bold green"
BETWEEN = "Speed: between tokens, over plain decoding"


@dataclass(frozen=True)
class Row:
    """A line of a table: a figure, its label, its scale, and whether it is a whole number."""

    figure: str
    label: str
    scale: float = 1.0
    whole: bool = False


RATIO = Row("", "")
SPEED = (
    Row("tokens_per_s", "tokens/s"),
    Row("request_tokens_per_s", "tokens/s of a request"),
    Row("ttft_s", "first token (ms)", 1e3),
)
GAPS = (
    Row("itl_mean_s", "between tokens (ms)", 1e3),
    Row("itl_p50_s", "  p50", 1e3),
    Row("itl_p90_s", "  p90", 1e3),
    Row("itl_p99_s", "  p99", 1e3),
    Row("burst_p50_s", "between bursts (ms)", 1e3),
    Row("burst_tokens", "tokens a burst"),
)
STEPS = (
    Row("steps", "steps", whole=True),
    Row("tokens_per_step", "tokens a step"),
    Row("tokens_per_pass", "tokens per pass"),
    Row("mean_acceptance_length", "acceptance length"),
)
ENCODER = (Row("encode_s", "encoder (ms)", 1e3),)  # of encoder-decoder models
CACHE = (
    Row("preemptions", "preemptions", whole=True),
    Row("prefix_hit_tokens", "prefix hits (tokens)", whole=True),
    Row("peak_blocks", "peak blocks", whole=True),
)
REQUESTS = (
    Row("requests_per_s", "requests/s"),
    Row("tokens_per_s", "tokens/s"),
    Row("ttft_p50_s", "first token p50 (ms)", 1e3),
    Row("ttft_p90_s", "  p90", 1e3),
    Row("ttft_p99_s", "  p99", 1e3),
    Row("itl_p50_s", "between tokens p50 (ms)", 1e3),
    Row("itl_p90_s", "  p90", 1e3),
    Row("itl_p99_s", "  p99", 1e3),
    Row("itl_mean_s", "  mean", 1e3),
    Row("e2e_p50_s", "whole request p50 (ms)", 1e3),
    Row("e2e_p90_s", "  p90", 1e3),
    Row("e2e_p99_s", "  p99", 1e3),
)
ENDS = (
    Row("completed", "completed", whole=True),
    Row("refused", "refused (429)", whole=True),
    Row("failed", "failed", whole=True),
)
ROWS: Mapping[str, Sequence[Row]] = {
    "throughput": (*SPEED, *STEPS, *CACHE),
    "latency": (*SPEED[2:], *GAPS, *SPEED[:1], *STEPS),
    "serve": (*REQUESTS, *ENDS),
}


def tables(benchmark: str, case: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of a case.

    Two modes are the columns of a table for prompts that run together and, if measured, of another table for prompts
    that run one at a time. Several ways are the rows of a table. Categories have a table too.
    """
    if SWEPT in case:
        yield _swept(case)
    elif benchmark not in ROWS:
        yield _ways(case)
    else:
        for end, title in (("", ""), (ONE_AT_A_TIME, "One at a time")):
            if PLAIN + end in case["runs"]:
                rows = (*ROWS[benchmark], *(ENCODER if case.get("sources") else ()))
                yield _modes(rows, case, end, title)
    if case.get("categories"):
        yield _categories(case)


def _empty(title: str, first: str, *headings: str) -> Table:
    table = Table(box=None, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _modes(rows: Sequence[Row], case: Mapping[str, Any], end: str, title: str) -> Table:
    modes = [mode for mode in (PLAIN, SPECULATIVE) if mode + end in case["runs"]]
    ratio = case["ratios"].get(f"{SPECULATIVE}{end}/{PLAIN}{end}")
    table = _empty(title, "", *modes, *([] if ratio is None else ["ratio"]))
    for row in rows:
        cells = [cell(case["runs"][mode + end].get(row.figure), row) for mode in modes]
        if ratio is not None:
            cells.append(cell(ratio.get(row.figure)))
        table.add_row(row.label, *cells)
    return table


def _ways(case: Mapping[str, Any]) -> Table:
    table = _empty(BETWEEN, "", "tokens/s", "speed", "predicted", "tokens/pass", "acceptance")
    for way, run in case["runs"].items():
        gain = case["gains"].get(way, {})
        cells = (
            _middle(run["tokens_per_s"]),
            cell(gain.get("measured_speed")),
            *(_middle(each) for each in (gain.get("predicted_speed"), run.get("tokens_per_pass"))),
            interval(gain.get("acceptance_rate")),
        )
        table.add_row(way, *cells, style=HIGHLIGHT if way == case.get("fastest") else None)
    return table


def _swept(case: Mapping[str, Any]) -> Table:
    table = _empty(BETWEEN, "length", "speed", "predicted", "tokens/pass", "expected", "")
    best = {name: case["best"][name]["length"] for name in ("found", "predicted")}
    for row in case[SWEPT]:
        remarks = [name for name, length in best.items() if length == row["length"]]
        cells = (
            *(cell(row["measured_speed"]), f"{row['predicted_speed']:.2f}"),
            *(_middle(row["tokens_per_pass"]), f"{row['expected_tokens']:.2f}"),
            f"best {' and '.join(remarks)}" if remarks else "",
        )
        table.add_row(str(row["length"]), *cells, style=HIGHLIGHT if "found" in remarks else None)
    return table


def _categories(case: Mapping[str, Any]) -> Table:
    """Return the speed over plain decoding and the acceptance of each way, by category."""
    first = next(iter(case["categories"].values()))["modes"]
    ways = [mode for mode in first if mode in case["gains"]] or list(first)
    table = _empty("By category: speed between tokens over plain, acceptance rate", "", "prompts", *ways)
    for name, each in case["categories"].items():
        modes = (each["modes"][way] for way in ways)
        cells = [f"{cell(mode.get('speed'))}, {_mean(mode['acceptance_rate'])}" for mode in modes]
        table.add_row(name, str(each["prompts"]), *cells)
    return table


def _middle(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else _number(RATIO, spread["median"])


def _mean(rate: Mapping[str, float] | None) -> str:
    return "-" if rate is None else f"{rate['mean']:.2f}"


def interval(rate: Mapping[str, float] | None) -> str:
    """Return an acceptance rate with its interval."""
    return "-" if rate is None else f"{rate['mean']:.3f} ({rate['low']:.3f}-{rate['high']:.3f})"


def cell(spread: Mapping[str, float] | None, row: Row = RATIO) -> str:
    """Return a figure with its quartiles."""
    if spread is None:
        return "-"
    low, middle, high = (_number(row, spread[name]) for name in ("q1", "median", "q3"))
    return middle if low == high else f"{middle} ({low}-{high})"


def _number(row: Row, value: float) -> str:
    value *= row.scale
    decimals = 0 if row.whole or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f}"
