"""The report of a benchmark: one dict for JSON, and tables made from the same dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from speculant import plugins
from speculant.bench.acceptance import pooled
from speculant.bench.gains import gains
from speculant.bench.measuring import ONE_AT_A_TIME, PLAIN, SPECULATIVE, Case, spreads
from speculant.bench.sizes import memory
from speculant.config import EngineConfig
from speculant.engine.build import Runtime

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "n", "max_tokens", "ignore_eos")
RATIOS = (
    (SPECULATIVE, PLAIN),
    (SPECULATIVE + ONE_AT_A_TIME, PLAIN + ONE_AT_A_TIME),
    (PLAIN, PLAIN + ONE_AT_A_TIME),
    (SPECULATIVE, SPECULATIVE + ONE_AT_A_TIME),
)
NEAR_TIES = "in float32 and bfloat16 near-ties may fall otherwise; --dtype float64 compares without rounding"


@dataclass(frozen=True)
class Row:
    """A line of a table: a figure, its label, its scale, and whether it is a whole number."""

    figure: str
    label: str
    scale: float = 1.0
    whole: bool = False


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
    Row("mean_acceptance_length", "acceptance length"),
)
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


def document(benchmark: str, config: EngineConfig, runtime: Runtime, cases: Sequence[Case]) -> dict[str, Any]:
    """Return all measurements, as `--json` prints them."""
    return {
        "benchmark": benchmark,
        "engine": {**asdict(config), "max_model_len": runtime.limits.max_model_len},
        "speculation": speculation(runtime, cases[0]),
        "blocks_total": runtime.engine.metrics.blocks_total,
        "memory": memory(config, runtime),
        "cases": [_case(case) for case in cases],
        "notes": list(_notes(config)),
    }


def speculation(runtime: Runtime, case: Case) -> dict[str, Any]:
    """Return whether speculation is on, with which drafter and verifier, or why it is off."""
    if SPECULATIVE not in case.runs:
        return {"on": False, "detail": "switched off for these requests" if runtime.drafting else runtime.speculation}
    asked = case.params.speculation if isinstance(case.params.speculation, Mapping) else {}
    length = asked.get("num_speculative_tokens")
    changed = "" if length is None else f" ({length} for these requests)"
    return {"on": True, "detail": f"{runtime.speculation}{changed}, verified by {case.runs[SPECULATIVE][0].verifier}"}


def _case(case: Case) -> dict[str, Any]:
    return {
        **case.workload.to_dict(),
        "sampling": {name: getattr(case.params, name) for name in SAMPLING},
        "rounds": len(case.runs[PLAIN]),
        "runs": {mode: plain_values(case.spreads(mode)) for mode in case.runs},
        "ratios": {
            f"{over}/{under}": plain_values(case.ratios(over, under))
            for over, under in RATIOS
            if over in case.runs and under in case.runs
        },
        "gains": {mode: _gain(case, mode) for mode in case.runs if mode.startswith(SPECULATIVE)},
        "outputs": _outputs(case),
    }


def _gain(case: Case, mode: str) -> dict[str, Any]:
    """Return what drafting gained; the acceptance is that of the first round, as later ones can be the same."""
    found = pooled(case.runs[mode][0].by_request)
    rounds = gains(case.runs[mode.replace(SPECULATIVE, PLAIN)], case.runs[mode])
    return {"acceptance_rate": asdict(found) if found else None, **(plain_values(spreads(rounds)) if rounds else {})}


def plain_values(spreads: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return spreads by name as plain values for JSON."""
    return {name: asdict(spread) for name, spread in spreads.items()}


def _outputs(case: Case) -> dict[str, Any]:
    """Return by mode how many outputs equal the plain ones; none are compared if they are sampled without a seed."""
    comparable = case.comparable
    return {
        "compared": comparable and bool(case.compared),
        "outputs": case.num_outputs,
        "identical": {mode: case.num_identical(mode) for mode in case.compared} if comparable else {},
    }


def _notes(config: EngineConfig) -> Iterator[str]:
    spec = config.speculative()
    if spec and spec.method and plugins.load("speculant.drafting", spec.method).METHOD.learns:
        yield "this drafter learns from earlier requests: after the first run it has seen these prompts' outputs"


def heading(case: Mapping[str, Any]) -> str:
    """Return a line that describes the workload."""
    tokens, sampling, rate = case["prompt_tokens"], case["sampling"], case["request_rate"]
    lengths = f"{tokens['min']}" if tokens["min"] == tokens["max"] else f"{tokens['min']} to {tokens['max']}"
    token_probs = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    arriving = f", {rate:g} arriving per second" if rate else ""
    return (
        f"{case['num_prompts']} prompts ({case['prompts']}) of {lengths} tokens{arriving}, "
        f"{sampling['max_tokens']} more each, {token_probs}; medians of {case['rounds']} rounds, with quartiles"
    )


def tables(benchmark: str, case: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for prompts that run together and, if measured, one for prompts that run one at a time."""
    for end, title in (("", ""), (ONE_AT_A_TIME, "One at a time")):
        if PLAIN + end in case["runs"]:
            yield _table(ROWS[benchmark], case, end, title)


def _table(rows: Sequence[Row], case: Mapping[str, Any], end: str, title: str) -> Table:
    table = Table(box=None, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    modes = [mode for mode in (PLAIN, SPECULATIVE) if mode + end in case["runs"]]
    ratio = case["ratios"].get(f"{SPECULATIVE}{end}/{PLAIN}{end}")
    table.add_column("")
    for name in [*modes, "ratio"] if ratio is not None else modes:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [_cell(row, case["runs"][mode + end].get(row.figure)) for mode in modes]
        if ratio is not None:
            cells.append(_cell(Row(row.figure, ""), ratio.get(row.figure)))
        table.add_row(row.label, *cells)
    return table


def _cell(row: Row, spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    low, middle, high = (_number(row, spread[name]) for name in ("q1", "median", "q3"))
    return middle if low == high else f"{middle} ({low}-{high})"


def _number(row: Row, value: float) -> str:
    value *= row.scale
    decimals = 0 if row.whole or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f}"


def conclusions(case: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conclusions of a case: the speedup, and whether the outputs are the same."""
    for name, ratio in case["ratios"].items():
        over, _, under = name.partition("/")
        times = _cell(Row("", ""), ratio["tokens_per_s"])
        yield f"{_display_name(over)}: {times} times the tokens/s of {_display_name(under)}"
    outputs = case["outputs"]
    for mode, found in case.get("gains", {}).items():  # a server tells none
        yield from _gained(_display_name(mode), found)
    for mode, identical in outputs["identical"].items():
        differing = "" if identical == outputs["outputs"] else f"; {NEAR_TIES}"
        yield f"outputs of {_display_name(mode)} identical to plain: {identical} of {outputs['outputs']}{differing}"
    if len(case["runs"]) > 1 and not outputs["compared"]:
        yield "outputs were not compared: sampled without a seed"


def _gained(mode: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the acceptance rate and what follows from it; nothing if nothing was drafted."""
    rate = found["acceptance_rate"]
    if rate is None or "best_length" not in found:
        return
    costs = " and ".join(f"{found[name]['median']:.3f}" for name in ("cost_ratio", "verification_ratio"))
    yield (
        f"{mode}: acceptance rate {rate['mean']:.3f} ({rate['low']:.3f}-{rate['high']:.3f}); "
        f"a drafted token and the verification cost {costs} steps of plain decoding"
    )
    yield (
        f"{mode}: {_cell(Row('', ''), found['predicted_speed'])} times the speed between tokens by the formula; "
        f"its best length is {found['best_length']['median']:.0f}"
    )


def _display_name(mode: str) -> str:
    return mode.removesuffix(ONE_AT_A_TIME) + (", one at a time" if mode.endswith(ONE_AT_A_TIME) else "")
