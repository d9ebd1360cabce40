"""Every drafter on several kinds of text: fixed lengths beside the adaptive one and plain decoding.

Texts, greedy: "edit" repeats a prompt of code with changes; "completion" continues openings of code; "unseen" continues
random tokens; "held-out" continues pieces of those files of Python's standard library on which no model or head was
trained. Engines run in turn, round by round, on prompts of the round's own, so that no store of finished requests has
seen the answers; the first rounds warm up. A round is one batch by default: it is short, so that other programs disturb
whole rounds and not single engines. A figure is the median over rounds of tokens per second over those of plain
decoding in the same round. `adaptive_over_best` is the adaptive length over the best fixed one, plain decoding
included. "default" names the two models and nothing else. With --shape, both models of the embedded pair are inflated:
text and acceptance stay, costs are those of the shape.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

from speculant.lab.bench import (  # fmt: skip
    DRAFT,
    SHAPE,
    TARGET,
    TEXTS,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    LoadedPair,
    Mode,
    Way,
    prompts_of,
    ratio,
    run_rounds,
)
from speculant.metrics import SpeculationMetrics
from speculant.params import SamplingParams

METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": DRAFT, "method": "draft_model"},
    "as large as the target": {"model": TARGET, "method": "draft_model"},
    "suffix": {"method": "suffix"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "ngram": {"method": "ngram"},
    "token_recycling": {"method": "token_recycling"},
    "fallback": {"method": "fallback"},
    "default": {"model": DRAFT},
    "random": {"method": "random"},
}


def compare(arguments: argparse.Namespace, pair: LoadedPair, text: str, method: str) -> dict[str, Any]:
    """Compare the lengths of one method on one kind of text."""
    base, batch, lengths = METHODS[method], arguments.batch, [str(length) for length in arguments.lengths]
    engines = {"plain": pair.engine(batch, **WITHOUT_DRAFTS)}
    for length in arguments.lengths:
        engines[str(length)] = pair.engine(batch, {**base, "num_speculative_tokens": length, "draft_length": "fixed"})
    engines["adaptive"] = pair.engine(batch, base)
    size, warm_up = arguments.prompts or batch, max(1, arguments.rounds // 4)
    every = prompts_of(text, engines["plain"].tokenizer, size * (warm_up + arguments.rounds))
    mode = Mode(SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True))
    ways = {label: Way(Bench(runtime), mode) for label, runtime in engines.items()}
    runs = run_rounds(ways, every, arguments.rounds, warm_up)
    drafted = {label: SpeculationMetrics.total(run.speculation for run in own) for label, own in runs.items()}
    times = {label: [run.seconds for run in own] for label, own in runs.items()}
    speeds = {label: ratio(times, "plain", label) for label in engines}
    best = max(["plain", *lengths], key=lambda label: speeds[label]["median"])
    tokens = arguments.tokens * size * arguments.rounds
    return {
        "drafts_by": engines["adaptive"].speculation,
        "speed": {label: speeds[label] for label in (*lengths, "adaptive")},
        "tokens_per_pass": {label: tokens / sum(run.steps for run in own) for label, own in runs.items()},
        "alpha": {
            label: drafted[label].acceptance_rate if drafted[label].num_tested_tokens else None
            for label in (*lengths, "adaptive")
        },
        "best_fixed": best,
        "adaptive_over_best": ratio(times, best, "adaptive"),
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare all methods on all texts."""
    shape = "" if arguments.shape == "demo" else f"_{arguments.shape}"
    arguments.name = f"never_slower{shape}_batch_{arguments.batch}"
    pair = LoadedPair.load(arguments.shape)
    seen: dict[str, dict[str, Any]] = {text: {} for text in arguments.texts}
    for text, method in itertools.product(arguments.texts, arguments.methods):
        seen[text][method] = compare(arguments, pair, text, method)
        yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Adaptive is at least 0.97 of plain decoding, and of the best fixed length, everywhere. Lookup "
    "drafters gain 2 on edits and nothing on unseen text.",
    measure=measure, rounds=20,
    options={
        "shape": SHAPE,
        "texts": {"nargs": "+", "choices": TEXTS, "default": ["edit", "completion", "unseen"]},
        "methods": list(METHODS), "lengths": [1, 2, 4, 6, 8, 12], "tokens": 128, "batch": 1,
        "prompts": {"type": int, "help": "of a round; a batch of them by default"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
