"""The report of a benchmark: one dict for JSON, with the gain from speculation, its tables and its conclusions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from speculant import plugins
from speculant.config import EngineConfig
from speculant.engine import Runtime
from speculant.lab.bench.measuring import (
    ONE_AT_A_TIME,
    PLAIN,
    SPECULATIVE,
    BenchCase,
    BenchRun,
    Spread,
    base_of,
    ratios,
    spreads,
)
from speculant.lab.bench.pair import Size, pooled
from speculant.lab.theory import VerificationCurve, best_length, expected_tokens, speedups, step_costs, survival
from speculant.models import read_model_config, resolve_source

SWEPT = "lengths"  # the key of a sweep's lengths in its cases
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
STEP_ROWS = (
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
    "throughput": (*SPEED, *STEP_ROWS, *CACHE),
    "latency": (*SPEED[2:], *GAPS, *SPEED[:1], *STEP_ROWS),
    "serve": (*REQUESTS, *ENDS),
}


class Grid(NamedTuple):
    """A table of text. best: the first cell of the row to highlight."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    best: str | None = None


def tables(benchmark: str, case: Mapping[str, Any]) -> Iterator[Grid]:
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
        yield category_table(case)


def figure_lines(rows: Sequence[Row], columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line of cells for each row: its label, then its figure in each column."""
    return [[row.label, *(cell(column.get(row.figure), row) for column in columns)] for row in rows]


def _modes(rows: Sequence[Row], case: Mapping[str, Any], end: str, title: str) -> Grid:
    runs = {mode: case["runs"][mode + end] for mode in (PLAIN, SPECULATIVE) if mode + end in case["runs"]}
    found, ratio = figure_lines(rows, list(runs.values())), case["ratios"].get(f"{SPECULATIVE}{end}/{PLAIN}{end}")
    if ratio is None:
        return Grid(["", *runs], found, title)
    compared = [[*line, cell(ratio.get(row.figure))] for line, row in zip(found, rows, strict=True)]
    return Grid(["", *runs, "ratio"], compared, title)


def _ways(case: Mapping[str, Any]) -> Grid:
    rows = []
    for way, run in case["runs"].items():
        gain = case["gains"].get(way, {})
        rows.append([
            way, _middle(run["tokens_per_s"]), cell(gain.get("measured_speed")), _middle(gain.get("predicted_speed")),
            _middle(run.get("tokens_per_pass")), interval(gain.get("acceptance_rate")),
        ])  # fmt: skip
    header = ("", "tokens/s", "speed", "predicted", "tokens/pass", "acceptance")
    return Grid(header, rows, BETWEEN, case.get("fastest"))


def _swept(case: Mapping[str, Any]) -> Grid:
    rows, best = [], {name: case["best"][name]["length"] for name in ("found", "predicted")}
    for row in case[SWEPT]:
        remarks = [name for name, length in best.items() if length == row["length"]]
        rows.append([
            str(row["length"]), cell(row["measured_speed"]), f"{row['predicted_speed']:.2f}",
            _middle(row["tokens_per_pass"]), f"{row['expected_tokens']:.2f}",
            f"best {' and '.join(remarks)}" if remarks else "",
        ])  # fmt: skip
    header = ("length", "speed", "predicted", "tokens/pass", "expected", "")
    return Grid(header, rows, BETWEEN, str(best["found"]))


def category_table(case: Mapping[str, Any]) -> Grid:
    """Return the speed over plain decoding and the acceptance of each way, by category."""
    first = next(iter(case["categories"].values()))["modes"]
    ways = [mode for mode in first if mode in case["gains"]] or list(first)
    rows = [
        [name, str(each["prompts"]), *(_speed_and_rate(each["modes"][way]) for way in ways)]
        for name, each in case["categories"].items()
    ]
    return Grid(["", "prompts", *ways], rows, "By category: speed between tokens over plain, acceptance rate")


def _speed_and_rate(mode: Mapping[str, Any]) -> str:
    rate = mode["acceptance_rate"]
    return f"{cell(mode.get('speed'))}, {'-' if rate is None else format(rate['mean'], '.2f')}"


def _middle(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else _number(RATIO, spread["median"])


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


_LONGEST = 32  # the longest draft that is considered
LEAST = 1e-6  # of a cost


def gain(plain: BenchRun, drafted: BenchRun) -> dict[str, float]:
    """Return the gain of a run with drafts over one without, by name; {} if a run has no steps to compare.

    draft_length: mean nodes of a draft. cost_ratio: c, the time to draft one more token / plain decoding's step.
    verification_ratio: V, the rest of a step / plain decoding's step. predicted_speed: by these, the pooled acceptance
    rate, the length of each draft and theorem 3.8 of arXiv 2211.17192; a step without a draft gives one token.
    best_length, best_speed: the highest predicted speed if every step has a draft, and V grows linearly with the rows.

    A step takes the time from one burst of tokens to the next. Only the time of drafting includes prompts: a draft
    model reads the prompt when it first drafts. For a drafter that drafts trees, lengths are numbers of nodes.
    """
    spec, before, after = drafted.speculation, _step_s(plain), _step_s(drafted)
    if not spec.num_tested_tokens or before is None or after is None:
        return {}
    length = spec.num_draft_tokens / spec.num_spec_steps
    cost_ratio = drafted.draft_s / drafted.steps / length / before
    rest = max(LEAST, after / before - length * cost_ratio)
    rows = max(2, round(1 + length))
    reached = survival(spec.acceptance_rate, _LONGEST)
    speeds = speedups(reached, step_costs(cost_ratio, VerificationCurve((1, rows), (1.0, rest)), _LONGEST))
    best = best_length(speeds)
    return {
        "draft_length": length,
        "cost_ratio": cost_ratio,
        "verification_ratio": rest,
        "predicted_speed": _tokens_per_step(drafted) / (length * cost_ratio + rest),
        "best_length": best,
        "best_speed": float(speeds[best]),
    }


def _tokens_per_step(run: BenchRun) -> float:
    """Return the expected tokens of a step after a request's first token, by the length of each draft."""
    spec = run.speculation
    expected = expected_tokens(survival(spec.acceptance_rate, max(spec.per_step_drafted)))
    steps = max(spec.num_spec_steps, sum(len(timing.pauses) for timing in run.timings))
    return 1 + float(sum(expected[length] - 1 for length in spec.per_step_drafted)) / steps


def gains(plain: Sequence[BenchRun], drafted: Sequence[BenchRun]) -> list[dict[str, float]]:
    """Return the gain of each round that has one."""
    found = [gain(*runs) for runs in zip(plain, drafted, strict=True)]
    return [each for each in found if each]


def _step_s(run: BenchRun) -> float | None:
    """Return the typical time from one burst of tokens to the next; None if no request has two."""
    pauses = [pause for timing in run.timings for pause in timing.pauses]
    return statistics.mean(pauses) if pauses else None


def memory(config: EngineConfig, runtime: Runtime) -> dict[str, float]:
    """Return the sizes of the target and the draft model: parameters, and the shares that the draft model adds.

    The shares are the memory overhead (docs/references.md, metrics) where both models have weights of one type. Other
    drafters add no parameters.
    """
    target = Size.of(runtime.checkpoint.config)
    spec = config.speculative()
    named = spec.model if spec and runtime.drafting else None
    draft = Size.of(read_model_config(resolve_source(named, "draft"))) if named else Size(0, 0)
    return {
        "target_parameters": target.parameters,
        "draft_parameters": draft.parameters,
        "parameters_share": draft.parameters / target.parameters,
        "cache_share": draft.values_per_token / target.values_per_token,
    }


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "n", "max_tokens", "ignore_eos")
RATIOS = (
    (SPECULATIVE, PLAIN),
    (SPECULATIVE + ONE_AT_A_TIME, PLAIN + ONE_AT_A_TIME),
    (PLAIN, PLAIN + ONE_AT_A_TIME),
    (SPECULATIVE, SPECULATIVE + ONE_AT_A_TIME),
)
GAP, PER_PASS = "itl_mean_s", "tokens_per_pass"  # figures of a run
FEWEST_ROUNDS = 3  # of a useful median
NEAR_TIES = "in float32 and bfloat16 near-ties may fall otherwise; --dtype float64 compares without rounding"
LEARNING = "this drafter learns from earlier requests: after the first run it has seen these prompts' outputs"


def document(benchmark: str, config: EngineConfig, runtime: Runtime, cases: Sequence[BenchCase]) -> dict[str, Any]:
    """Return all measurements, as `--json` prints them."""
    return {
        "benchmark": benchmark,
        "engine": {**asdict(config), "max_model_len": runtime.limits.max_model_len},
        "speculation": speculation(runtime, cases[0]),
        "blocks_total": runtime.engine.metrics.blocks_total,
        "memory": memory(config, runtime),
        "cases": [_case(case) for case in cases],
        "notes": [LEARNING] if keeps_answers(config) else [],
    }


def speculation(runtime: Runtime, case: BenchCase) -> dict[str, Any]:
    """Return whether speculation is on, with which drafter and verifier, or why it is off."""
    if SPECULATIVE not in case.runs:
        return {"on": False, "detail": "switched off for these requests" if runtime.drafting else runtime.speculation}
    asked = case.params.speculation if isinstance(case.params.speculation, Mapping) else {}
    length = asked.get("num_speculative_tokens")
    changed = "" if length is None else f" ({length} for these requests)"
    return {"on": True, "detail": f"{runtime.speculation}{changed}, verified by {case.runs[SPECULATIVE][0].verifier}"}


def keeps_answers(config: EngineConfig) -> bool:
    """Whether the named drafter keeps the outputs of earlier requests, even those with other cache salts."""
    spec = config.speculative()
    if spec is None or spec.method is None:
        return False
    method = plugins.load("speculant.drafting", spec.method).METHOD
    return bool(method.learns and not method.on_request)


def _case(case: BenchCase) -> dict[str, Any]:
    return {
        **case.workload.to_dict(),
        "sampling": {name: getattr(case.params, name) for name in SAMPLING},
        "rounds": len(case.runs[PLAIN]),
        "runs": {mode: plain_values(case.spreads(mode)) for mode in case.runs},
        "ratios": {f"{over}/{under}": plain_values(case.ratios(over, under)) for over, under in _pairs(case)},
        "gains": {mode: _gain(case, mode) for mode in case.runs if mode != base_of(mode)},
        "outputs": _outputs(case),
        "categories": by_category(case),
    }


def _pairs(case: BenchCase) -> Iterator[tuple[str, str]]:
    """Yield the pairs of modes that are compared: the usual ones, and any other way with plain decoding."""
    usual = {mode for pair in RATIOS for mode in pair}
    yield from (pair for pair in RATIOS if set(pair) <= set(case.runs))
    yield from ((mode, PLAIN) for mode in case.runs if mode not in usual)


def _gain(case: BenchCase, mode: str) -> dict[str, Any]:
    """Return the gain from drafting; the acceptance is taken from the first round, as later rounds can be the same.

    measured_speed: between tokens, over plain decoding; see `gain` for the other figures.
    """
    found = pooled(case.runs[mode][0].by_request)
    figures = spreads(rounds) if (rounds := gains(case.runs[base_of(mode)], case.runs[mode])) else {}
    if (speed := case.ratios(base_of(mode), mode).get("itl_mean_s")) is not None:
        figures = {"measured_speed": speed, **figures}
    return {"acceptance_rate": asdict(found) if found else None, **plain_values(figures)}


def plain_values(spreads: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return spreads by name as plain values for JSON."""
    return {name: asdict(spread) for name, spread in spreads.items()}


def _outputs(case: BenchCase) -> dict[str, Any]:
    """Return by mode how many outputs equal the plain ones; outputs sampled without a seed are not compared."""
    comparable = case.comparable
    return {
        "compared": comparable and bool(case.compared),
        "outputs": case.num_outputs,
        "identical": {mode: case.num_identical(mode) for mode in case.compared} if comparable else {},
    }


def heading(case: Mapping[str, Any]) -> str:
    """Return a line that describes the workload."""
    tokens, sampling, rate = case["prompt_tokens"], case["sampling"], case["request_rate"]
    lengths = f"{tokens['min']}" if tokens["min"] == tokens["max"] else f"{tokens['min']} to {tokens['max']}"
    token_probs = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    arriving = f", {rate:g} arriving per second" if rate else ""
    batch = f", {case['batch']} at a time" if "batch" in case else ""
    given = "sources" if case.get("sources") else "prompts"
    return (
        f"{case['num_prompts']} {given} ({case['prompts']}) of {lengths} tokens{arriving}{batch}, "
        f"{sampling['max_tokens']} more each, {token_probs}; {described_rounds(case['rounds'])}"
    )


def described_rounds(number: int) -> str:
    """Describe the figures of a number of rounds: medians, or too few for a median."""
    if number < FEWEST_ROUNDS:
        return f"{number} round{'s' if number > 1 else ''}, too few for a median: a quick look"
    return f"medians of {number} rounds, with quartiles"


def conclusions(case: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conclusions of a case: those of its benchmark, or its speeds; then whether the outputs are the same."""
    if "conclusions" in case:
        yield from case["conclusions"]
    else:
        yield from _speeds(case)
    outputs = case["outputs"]
    for mode, identical in outputs["identical"].items():
        differing = "" if identical == outputs["outputs"] else f"; {NEAR_TIES}"
        yield f"outputs of {_display_name(mode)} identical to plain: {identical} of {outputs['outputs']}{differing}"
    if len(case["runs"]) > 1 and not outputs["compared"]:
        yield "outputs were not compared: sampled without a seed"


def _speeds(case: Mapping[str, Any]) -> Iterator[str]:
    for name, ratio in case["ratios"].items():
        over, _, under = name.partition("/")
        times = cell(ratio["tokens_per_s"])
        yield f"{_display_name(over)}: {times} times the tokens/s of {_display_name(under)}"
    for mode, found in case.get("gains", {}).items():  # a server has none
        yield from _gained(_display_name(mode), found)


def _gained(mode: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the acceptance rate, the costs and the predicted speed; nothing if nothing was drafted."""
    rate = found["acceptance_rate"]
    if rate is None or "best_length" not in found:
        return
    costs = " and ".join(f"{found[name]['median']:.3f}" for name in ("cost_ratio", "verification_ratio"))
    yield (
        f"{mode}: acceptance rate {interval(rate)}; "
        f"a drafted token and the verification cost {costs} steps of plain decoding"
    )
    yield (
        f"{mode}: {cell(found['predicted_speed'])} times the speed between tokens by the formula; "
        f"its best length is {found['best_length']['median']:.0f}"
    )


def _display_name(mode: str) -> str:
    return mode.removesuffix(ONE_AT_A_TIME) + (", one at a time" if mode.endswith(ONE_AT_A_TIME) else "")


def by_category(case: BenchCase) -> dict[str, dict[str, Any]]:
    """Return figures by category; {} if the prompts have none.

    modes: by name the mean acceptance rate with its interval (of the first round), the tokens per pass and, over plain
    decoding, the speed between tokens. A figure that a category does not define is missing.
    """
    names = case.workload.categories
    return {
        name: _figures(case, [place for place, each in enumerate(names) if each == name])
        for name in dict.fromkeys(names)
    }


def _figures(case: BenchCase, prompts: Sequence[int]) -> dict[str, Any]:
    samples = case.params.n
    places = [samples * prompt + sample for prompt in prompts for sample in range(samples)]
    parts = {mode: [_part(run, places) for run in runs] for mode, runs in case.runs.items()}
    return {"prompts": len(prompts), "modes": {mode: _mode(parts, mode) for mode in parts}}


def _part(run: BenchRun, places: Sequence[int]) -> BenchRun:
    """Return a run with some of its outputs; its totals stay the totals of all outputs."""
    return replace(
        run,
        outputs=[run.outputs[place] for place in places],
        timings=[run.timings[place] for place in places],
        by_request=[run.by_request[place] for place in places],
    )


def _mode(parts: Mapping[str, Sequence[BenchRun]], mode: str) -> dict[str, Any]:
    own, base = ([run.figures() for run in parts[each]] for each in (mode, base_of(mode)))
    accepted = pooled(parts[mode][0].by_request)
    figures: dict[str, Any] = {"acceptance_rate": asdict(accepted) if accepted else None}
    if all(PER_PASS in each for each in own):
        figures[PER_PASS] = asdict(Spread.of([each[PER_PASS] for each in own]))
    if mode != base_of(mode) and (speed := ratios(base, own).get(GAP)):
        figures["speed"] = asdict(speed)
    return figures
