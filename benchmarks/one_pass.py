"""Compares drafts in one pass (PARD) with chains: their time, their acceptance by position, and the speed they give.

`speculant train draft --parallel 8 --target demo --start demo --out OUT` makes the draft model OUT/1. "chain" is the
embedded draft model. "one pass" is the trained one, and "token by token" is the same model drafting token by token.
"default with one pass" sets only the target and the trained model. With --shape 1b the three models are inflated: they
write the same texts, at the cost of 1.1 billion parameters for the target and 50 million for each draft model.

Times are those of drafts in steps of the engine. Speeds are tokens per second after the first token of each request,
divided by those of plain decoding in the same round. All ways share one target and take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speculant.engine.build import Runtime
from speculant.lab.bench.decoding import (
    COMPLETION,
    DRAFT,
    PLAIN,
    SHAPE,
    TARGET,
    Decoded,
    LoadedPair,
    decode,
    prompts_of,
)
from speculant.lab.bench.runner import Benchmark, markdown, ratio
from speculant.lab.bench.step_costs import LengthCosts, measure_steps
from speculant.lab.inflation.kept import inflated_pair
from speculant.metrics import SpeculationMetrics
from speculant.models.source import resolve_source
from speculant.params import SamplingParams

LENGTHS, DRAFTED = (0, 1, 2, 4, 8), (2, 4, 8)
CHAIN, ONE_PASS, BY_TOKEN, DEFAULT = "chain", "one pass", "token by token", "default with one pass"
TOKENS, PROMPT = 96, 64


def pairs(arguments: argparse.Namespace) -> tuple[LoadedPair, LoadedPair]:
    """Return the pairs with the embedded draft and with the trained one; they share the loaded target."""
    if arguments.shape == "demo":
        target, usual = resolve_source("demo", "target"), resolve_source("demo", "draft")
        own = arguments.draft
    else:
        (target, usual), (_, own) = inflated_pair(arguments.shape), inflated_pair(arguments.shape, arguments.draft)
    pair = LoadedPair.of(target, usual)
    return pair, LoadedPair(pair.target, {TARGET: str(target), DRAFT: str(own)})


def engines(arguments: argparse.Namespace, batch: int) -> dict[str, Runtime]:
    """Make the engines."""
    usual, own = pairs(arguments)
    fixed = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 8, "draft_length": "fixed"}
    return {
        "plain": usual.engine(batch, **PLAIN),
        CHAIN: usual.engine(batch, fixed),
        ONE_PASS: own.engine(batch, fixed),
        BY_TOKEN: own.engine(batch, {**fixed, "parallel": False}),
        DEFAULT: own.engine(batch, draft_model=own.folders[DRAFT]),
    }


def by_position(metrics: SpeculationMetrics, length: int) -> list[float]:
    """Return how often each token of a draft was accepted, of those whose predecessors were."""
    counts = [*metrics.acceptance_histogram, *[0] * length][: length + 1]
    reached = [sum(counts[place:]) for place in range(length + 1)]
    return [reached[place + 1] / reached[place] if reached[place] else 0.0 for place in range(length)]


def speeds(arguments: argparse.Namespace, runtimes: dict[str, Runtime], batch: int) -> dict[str, Any]:
    """Decode in all ways, round by round."""
    ways = {"plain": ("plain", 0), DEFAULT: (DEFAULT, 0)}
    ways |= {f"{name}, {length}": (name, length) for name in (CHAIN, ONE_PASS) for length in DRAFTED}
    prompts = prompts_of(COMPLETION, runtimes["plain"].tokenizer, batch * (arguments.rounds + 1))
    runs: dict[str, list[Decoded]] = {way: [] for way in ways}
    for number in range(arguments.rounds + 1):
        own = prompts[number * batch : (number + 1) * batch]
        for way in list(ways) if number % 2 else list(ways)[::-1]:
            runs[way].append(decode_at(runtimes[ways[way][0]], own, ways[way][1]))
    kept = {way: own[1:] for way, own in runs.items()}  # the first round warms up
    times = {way: [run.decode_s for run in own] for way, own in kept.items()}
    totals = {way: _total(own) for way, own in kept.items()}
    return {
        "over_plain": {way: ratio(times, "plain", way) for way in ways if way != "plain"},
        "accepted_by_position": {
            way: by_position(totals[way], length) for way, (_, length) in ways.items() if length == max(DRAFTED)
        },
        "tokens_per_pass": {
            way: batch * TOKENS * len(own) / sum(run.passes for run in own) for way, own in kept.items()
        },
    }


def decode_at(runtime: Runtime, prompts: Sequence[Sequence[int]], length: int) -> Decoded:
    """Decode with drafts of a length; 0 = as the engine chooses."""
    return decode(runtime, prompts, TOKENS, {"num_speculative_tokens": length} if length else None)


def _total(runs: Sequence[Decoded]) -> SpeculationMetrics:
    total = SpeculationMetrics()
    for run in runs:
        total.add(run.speculation)
    return total


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each batch size."""
    seen = dict[str, Any]()
    for batch in arguments.batches:
        runtimes = engines(arguments, batch)
        prompt = prompts_of(COMPLETION, runtimes["plain"].tokenizer, 1)[0][:PROMPT]
        names = [CHAIN, BY_TOKEN, ONE_PASS]
        costs: dict[str, LengthCosts] = measure_steps(
            dict.fromkeys(names, LENGTHS), {name: runtimes[name] for name in names}, prompt,
            SamplingParams(temperature=0), arguments.seconds, batch,
        )  # fmt: skip
        drafted = {name: dict(zip(LENGTHS, costs[name].draft_s, strict=True)) for name in names}
        seen[f"batch {batch}"] = {
            "draft_s": drafted,
            "one_pass_over_token_by_token": {n: drafted[ONE_PASS][n] / drafted[BY_TOKEN][n] for n in LENGTHS if n},
            "plain_s": costs[CHAIN].plain_s,
            **speeds(arguments, runtimes, batch),
        }
        yield seen


def show(figures: dict[str, Any]) -> str:
    """Return tables of times and of speeds."""
    parts = []
    for batch, own in figures.items():
        rows = [
            [name, *(f"{1e3 * seconds:.2f}" for length, seconds in each.items() if length)]
            for name, each in own["draft_s"].items()
        ]
        shares = [f"{each:.2f}" for each in own["one_pass_over_token_by_token"].values()]
        parts.append(
            markdown([f"{batch}: ms for", *map(str, LENGTHS[1:])], [*rows, ["one pass / token by token", *shares]])
        )
        speed = [
            [way, f"{each['median']:.2f} ({each['q1']:.2f}-{each['q3']:.2f})", f"{own['tokens_per_pass'][way]:.2f}"]
            for way, each in own["over_plain"].items()
        ]
        parts.append(markdown([batch, "over plain decoding", "tokens per pass"], speed))
        positions = [[way, *(f"{each:.2f}" for each in rates)] for way, rates in own["accepted_by_position"].items()]
        parts.append(markdown(["accepted at", *map(str, range(1, max(DRAFTED) + 1))], positions))
    return "\n\n".join(parts)


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="At 1B a draft of 4 tokens in one pass takes 0.3 of the chain's time, of 8 tokens 0.17. From the second "
    "token on it is accepted less often than the chain's, so it is 1.1 times as fast at 4 tokens.",
    measure=measure, rounds=7, show=show,
    options={
        "draft": Path, "shape": SHAPE, "batches": [1],
        "seconds": {"type": float, "default": 10.0, "help": "for the times of drafts"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
