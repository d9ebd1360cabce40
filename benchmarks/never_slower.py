"""Every drafter on three kinds of text: fixed lengths beside the adaptive one and plain decoding.

    python benchmarks/never_slower.py [--texts edit] [--methods suffix] [--rounds 5] [--batch 1]

Texts, greedy: "edit" repeats a prompt of code with changes; "completion" continues openings of code; "unseen" continues
random tokens. Engines run in turn, round by round, on prompts of the round's own, so that no store of finished requests
knows the answers; the first round warms up. A figure is the median over rounds of tokens per second over those of plain
decoding in the same round. `adaptive_over_best` is the adaptive length over the best fixed one, plain too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from measuring import spread, write

from speculant import LLM, SamplingParams
from speculant.bench.workloads import code_prompt
from speculant.engine.build import Runtime

LENGTHS = (1, 2, 4, 6, 8, 12)
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": "demo"},
    "as large as the target": {"method": "draft_model"},
    "suffix": {"method": "suffix"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "ngram": {"method": "ngram"},
    "token_recycling": {"method": "token_recycling"},
    "fallback": {"method": "fallback"},
    "arms": {"model": "demo", "method": "fallback"},
    "random": {"method": "random"},
}
PREDICTED = (
    "Adaptive is at least 0.97 of plain decoding, and of the best fixed length, everywhere. Lookup drafters gain 2 "
    "on edits and nothing on unseen text."
)


def prompts(kind: str, runtime: Runtime, count: int) -> list[list[int]]:
    """Return prompts of one kind of text."""
    tokenizer = runtime.tokenizer
    if kind == "completion":
        return [code_prompt(tokenizer, index) for index in range(count)]
    if kind == "unseen":
        return [[(7919 * (index + 1) * (place + 3)) % 900 + 20 for place in range(64)] for index in range(count)]
    made = []
    for index in range(count):
        code = code_prompt(tokenizer, index, 160)
        made.append([*code, *tokenizer.encode("\n\n\n", add_special_tokens=False), *code[: len(code) // 2]])
    return made


def engine(arguments: argparse.Namespace, config: dict[str, Any] | None) -> LLM:
    """Make an engine; config None = plain."""
    chosen: dict[str, Any] = {"use_speculative_decoding": False} if config is None else {"speculative_config": config}
    if config is not None and config.get("method") == "draft_model" and "model" not in config:
        chosen = {"draft_model": arguments.model_folder, "speculative_config": config}
    return LLM(arguments.model, dtype="bfloat16", max_num_seqs=arguments.batch, max_model_len=1024, **chosen)


def run(llm: LLM, batch: Sequence[Sequence[int]], tokens: int) -> tuple[float, int]:
    """Generate and return the seconds, and how many passes of the target were made."""
    before, started = llm.engine.metrics.steps, time.perf_counter()
    llm.generate([list(prompt) for prompt in batch], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - started, llm.engine.metrics.steps - before


def measure(arguments: argparse.Namespace, kind: str, name: str) -> dict[str, Any]:
    """Compare the lengths of one method on one kind of text."""
    base = METHODS[name]
    engines: dict[str, LLM] = {"plain": engine(arguments, None)}
    for length in arguments.lengths:
        engines[str(length)] = engine(arguments, {**base, "num_speculative_tokens": length, "draft_length": "fixed"})
    engines["adaptive"] = engine(arguments, {**base, "draft_length": "adaptive"})
    every = prompts(kind, engines["plain"]._runtime, arguments.prompts * (1 + arguments.rounds))
    times: dict[str, list[float]] = {label: [] for label in engines}
    steps = dict.fromkeys(engines, 0)
    for first in range(0, len(every), arguments.prompts):
        for label, llm in engines.items():
            seconds, passes = run(llm, every[first : first + arguments.prompts], arguments.tokens)
            if first:
                times[label].append(seconds)
                steps[label] += passes
    speeds = {
        label: [plain / own for plain, own in zip(times["plain"], times[label], strict=True)]
        for label in engines
        if label != "plain"
    }
    best = max(["plain", *map(str, arguments.lengths)], key=lambda label: statistics.median(speeds.get(label, [1.0])))
    over = [fixed / own for fixed, own in zip(times[best], times["adaptive"], strict=True)]
    tokens = arguments.tokens * arguments.prompts * arguments.rounds
    return {
        "speed": {label: spread(values) for label, values in speeds.items()},
        "tokens_per_pass": {label: tokens / count for label, count in steps.items()},
        "best_fixed": best,
        "adaptive_over_best": spread(over),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", nargs="+", default=["edit", "completion", "unseen"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    arguments.model_folder = str(LLM(arguments.model, use_speculative_decoding=False)._runtime.checkpoint.folder)
    seen = {kind: {name: measure(arguments, kind, name) for name in arguments.methods} for kind in arguments.texts}
    write(f"never_slower_batch_{arguments.batch}", PREDICTED, seen)


if __name__ == "__main__":
    main()
