"""The report of a benchmark: one dict for JSON, and the sentences that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from speculant import plugins
from speculant.config import EngineConfig
from speculant.engine import Runtime
from speculant.lab.bench.acceptance import pooled
from speculant.lab.bench.gains import gains
from speculant.lab.bench.measuring import ONE_AT_A_TIME, PLAIN, SPECULATIVE, BenchCase, Spread, base_of, ratios, spreads
from speculant.lab.bench.runs import BenchRun
from speculant.lab.bench.sizes import memory
from speculant.lab.bench.tables import cell, interval

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
    """Return the gain from drafting; the acceptance is that of the first round, as later ones can be the same.

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
    """Return a run with some of its outputs; its totals stay those of all outputs."""
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
