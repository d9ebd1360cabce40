"""Boosted drafts in one tree against as many draws of a single draft, at equal nodes (arXiv 2305.09781).

    python benchmarks/boosted.py [--drafts FOLDER] [--steps 40] [--known-share 0] [--prompts 24] [--tokens 96]

Without --drafts, three drafts are trained for the embedded target, from the embedded draft, with `speculant train
draft`, on one thread. `held_out` are their figures: `covered`, the share of tokens whose likeliest one some draft up
to this one has, and `alone`, the share for which it is among as many likeliest tokens of the first draft. Then trees
of 2 and 3 chains are drafted for the same prompts: a chain of each draft, or draws of the first draft alone. `first`
is the share of passes in which a token is accepted. `gain`: 1 + accepted tokens / passes that checked a draft
(`tokens_per_pass`), of the boosted drafts over the other's by prompt, mean and 95% interval. Drafts that agree share
nodes, so that trees have fewer than they may: `single_cut` is the other tree, cut level by level to as many nodes as
the boosted drafts' trees really have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import write

from speculant import LLM, SamplingParams
from speculant.cli.main import app
from speculant.lab.bench.workloads import code_prompt
from speculant.types import RequestOutput

COUNTS, DEPTH, TEMPERATURES = (2, 3), 4, (0.0, 1.0)
TRAINED, SEQ, WARMUP = 40_000, 256, 8  # tokens of the target's texts, in a text, and steps
STUDENT = 2.07  # quantile of the interval, for about 24 prompts
PREDICTED = (
    "After so short a training the second draft predicts 15% of what the first misses. The two likeliest tokens of the "
    "first draft hold the target's more often than the drafts' likeliest ones together, by 0.03. So K draws of the "
    "single draft give 2-6% more tokens per pass at temperature 0; at temperature 1 the difference is within 3%."
)


def train(folder: Path, steps: int, known_share: float) -> None:
    """Train the drafts into a folder."""
    torch.set_num_threads(1)
    arguments = {
        "boosted": max(COUNTS), "target": "demo", "start": "demo", "out": folder, "steps": steps, "warmup": WARMUP,
        "tokens": TRAINED, "seq": SEQ, "known-share": known_share,
    }  # fmt: skip
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    app(["train", "draft", *words], standalone_mode=False)


def drafting(folder: Path, count: int, boosted: bool) -> dict[str, Any]:
    """Return the speculative config of a tree of `count` chains."""
    first, *others = [str(folder / str(number)) for number in range(1, count + 1)]
    models = {"models": others, "draws": 1} if boosted else {"draws": count}
    return {
        "method": "specinfer", "model": first, "depth": DEPTH, "num_speculative_tokens": count * DEPTH, **models
    }  # fmt: skip


def generate(speculative: dict[str, Any], arguments: argparse.Namespace, temperature: float) -> list[RequestOutput]:
    """Return the outputs for all prompts."""
    llm = LLM("demo", dtype="float32", speculative_config=speculative, max_num_seqs=8)
    prompts = [code_prompt(llm.tokenizer, index) for index in range(arguments.prompts)]
    return llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=arguments.tokens, ignore_eos=True))


def figures(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """Return what was accepted, and how many nodes that took."""
    found = [output.metrics.speculative_decoding for output in outputs]
    passes = sum(each.num_spec_steps for each in found)
    accepted = sum(each.num_accepted_draft_tokens for each in found)
    return {
        "tokens_per_pass": 1 + accepted / passes,
        "nodes_per_pass": sum(each.num_draft_tokens for each in found) / passes,
        "first": 1 - sum(each.acceptance_histogram[0] for each in found if each.acceptance_histogram) / passes,
    }


def gain(boosted: Sequence[RequestOutput], single: Sequence[RequestOutput]) -> dict[str, float]:
    """Compare prompt by prompt."""
    lengths = [[each.metrics.speculative_decoding.mean_acceptance_length for each in own] for own in (boosted, single)]
    ratios = [ours / theirs for ours, theirs in zip(*lengths, strict=True)]
    mean, half = statistics.fmean(ratios), STUDENT * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all trees."""
    seen: dict[str, Any] = {"held_out": {}, "trees": {}}
    for number in range(1, max(COUNTS) + 1):
        seen["held_out"][str(number)] = json.loads((folder / str(number) / "measured.json").read_text(encoding="utf-8"))
    for temperature in TEMPERATURES:
        for count in COUNTS:
            boosted, single = (
                generate(drafting(folder, count, each), arguments, temperature) for each in (True, False)
            )
            nodes = round(figures(boosted)["nodes_per_pass"])
            fewer = {**drafting(folder, count, False), "num_speculative_tokens": nodes}
            cut = generate(fewer, arguments, temperature)
            seen["trees"][f"{count} chains of {DEPTH}, temperature {temperature:g}"] = {
                "boosted": figures(boosted),
                "single": figures(single),
                "single_cut": figures(cut),
                "gain": gain(boosted, single),
                "gain_at_equal_nodes": gain(boosted, cut),
            }
    return seen


def main() -> None:
    """Measure and write results/boosted.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--known-share", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.drafts or Path(temporary)
        if not (folder / "1").exists():
            train(folder, arguments.steps, arguments.known_share)
        write("boosted", PREDICTED, measure(folder, arguments))


if __name__ == "__main__":
    main()
