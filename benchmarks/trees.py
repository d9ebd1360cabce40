"""Chains, static trees and dynamic trees of one drafter: time of a draft, tokens per pass and speed.

Each way drafts in every step, in greedy decoding of held-out code (`prompts_of`), by the embedded target or its
inflation to 1B. All ways run once a round, on the round's prompts, every other round backwards; the first round warms
up. `draft_s` is the time of drafting over the drafts, `per_node` that time per node over the same of the first chain.
`speed` is plain decoding's time after the first token over the way's, in the same round; figures are quartiles.

`verify` is the time of a pass of the target, its logits included, with a tree of 2 to 32 nodes after a text, over that
of a pass without a draft. Its trees branch in two at each node; a chain has the same number of rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from speculant.cache import slotted_cache
from speculant.lab.bench import (
    DRAFT,
    HELD_OUT,
    SHAPE,
    WITHOUT_DRAFTS,
    Bench,
    Benchmark,
    BenchRun,
    LoadedPair,
    Mode,
    Way,
    markdown,
    prompts_of,
    ratio,
    run_rounds,
    shown,
    tokens_per_pass,
)
from speculant.lab.inflation import inflated_head
from speculant.metrics import SpeculationMetrics
from speculant.models import CausalLM, SequenceInput, build_batch, embedded_heads, resolve_source
from speculant.params import SamplingParams
from speculant.types import DraftTree

UNDRAFTED, FIRST = "plain", "chain of 8"
NODES, CONTEXT = (2, 5, 8, 16, 32), 128


class Shape(NamedTuple):
    """A shape, as the option `tree`, None = a chain; and the nodes of a draft."""

    tree: Any
    nodes: int


WAYS = {
    FIRST: Shape(None, 8),
    "chain of 4": Shape(None, 4),
    "static, 8": Shape([2, 1, 1, 1], 8),
    "dynamic, 8": Shape("dynamic", 8),
    "static, 21": Shape([3, 2, 1, 1], 21),
    "dynamic, 21": Shape("dynamic", 21),
}


def bench_of(arguments: argparse.Namespace, pair: LoadedPair, method: str, way: Shape) -> Bench:
    """Return the engine of a way to draft."""
    config = {"method": method, "model": DRAFT, "num_speculative_tokens": way.nodes, "draft_length": "fixed"}
    if method in embedded_heads():
        small = resolve_source("demo", f"heads/{method}")
        config["model"] = str(small if arguments.shape == "demo" else inflated_head(small, arguments.shape))
    return Bench(pair.engine(1, config if way.tree is None else {**config, "tree": way.tree}))


def compare(arguments: argparse.Namespace, pair: LoadedPair, method: str) -> dict[str, Any]:
    """Run all ways of a method."""
    benches = {UNDRAFTED: Bench(pair.engine(1, **WITHOUT_DRAFTS))}
    benches |= {name: bench_of(arguments, pair, method, way) for name, way in WAYS.items()}
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    size = arguments.prompts
    prompts = prompts_of(HELD_OUT, benches[UNDRAFTED].runtime.tokenizer, size * (1 + arguments.rounds))
    mode = Mode(params, sequential=True)
    runs = run_rounds({name: Way(bench, mode) for name, bench in benches.items()}, prompts, arguments.rounds, 1)
    times = {name: [run.figures()["itl_mean_s"] for run in own] for name, own in runs.items()}
    drafted = {name: _draft_seconds(runs[name]) for name in WAYS}
    return {
        name: {
            "draft_s": drafted[name],
            "per_node": drafted[name] / way.nodes / (drafted[FIRST] / WAYS[FIRST].nodes),
            "tokens_per_pass": tokens_per_pass(runs[name]),
            "speed": ratio(times, UNDRAFTED, name),
        }
        for name, way in WAYS.items()
    }


def _draft_seconds(runs: Sequence[BenchRun]) -> float:
    drafts = SpeculationMetrics.total(run.speculation for run in runs).num_spec_steps
    return sum(run.draft_s for run in runs) / max(1, drafts)


@torch.inference_mode()
def verify(model: CausalLM, seconds: float) -> dict[str, dict[str, Any]]:
    """Return the time of passes with chains and trees over that of a pass without a draft, all in turn."""
    cache = slotted_cache(model.cache_shape, 1, CONTEXT + 1 + NODES[-1])
    shapes = {("", 0): DraftTree.empty()}
    shapes |= {("chain", count): DraftTree.of([1] * count, list(range(-1, count - 1))) for count in NODES}
    shapes |= {("tree", count): DraftTree.of([1] * count, [node // 2 - 1 for node in range(count)]) for count in NODES}

    def run(tokens: Sequence[int], tree: DraftTree) -> None:
        batch = build_batch([SequenceInput(0, tokens, tree)], cache, model.cache_shape.device)
        model.logits(model.forward(batch, cache.storage).last)

    run([1] * CONTEXT, DraftTree.empty())
    times: dict[Any, list[float]] = {shape: [] for shape in shapes}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["", 0]) < 3:
        for shape, tree in shapes.items():
            started = time.perf_counter()
            run([1], tree)
            times[shape].append(time.perf_counter() - started)
            cache.truncate_to(0, CONTEXT)
    return {
        kind: {str(count): ratio({"a": times[kind, count], "b": times["", 0]}, "a", "b") for count in NODES}
        for kind in ("chain", "tree")
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the passes, then each method."""
    pair = LoadedPair.load(arguments.shape)
    seen: dict[str, Any] = {"verify": verify(pair.target.model, arguments.seconds), "methods": {}}
    for method in arguments.methods:
        seen["methods"][method] = compare(arguments, pair, method)
        yield seen


def show(figures: dict[str, Any]) -> str:
    """Return the tables."""
    rows = [[kind, *(f"{each['median']:.2f}" for each in own.values())] for kind, own in figures["verify"].items()]
    parts = [markdown(["nodes in a pass", *map(str, NODES)], rows)]
    for method, ways in figures["methods"].items():
        rows = [
            [name, f"{1e3 * each['draft_s']:.2f}", f"{each['per_node']:.2f}", f"{each['tokens_per_pass']:.2f}",
             shown(each['speed'])]
            for name, each in ways.items()
        ]  # fmt: skip
        parts.append(markdown([method, "ms a draft", "per node", "tokens per pass", "over plain decoding"], rows))
    return "\n\n".join(parts)


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="A node of a static tree takes 0.7 of a chain's node. Dynamic trees have 1.1 times the tokens per pass "
    "of static ones with as many nodes, and take twice the time to draft. On the embedded target no tree is faster "
    "than the best chain. At 1B in bfloat16 a dynamic tree of 8 nodes is 1.05 times as fast as a chain of 8 with "
    "draft_model, and as fast with the heads.",
    measure=measure, rounds=3, show=show,
    options={
        "shape": SHAPE, "methods": ["draft_model", "eagle", "eagle3"], "tokens": 64,
        "prompts": {"type": int, "default": 3, "help": "of a round"},
        "seconds": {"type": float, "default": 10.0, "help": "for the passes"},
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
