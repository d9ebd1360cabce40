"""What running requests together is worth, with speculation on and off, and what a shared prefix saves.

    python benchmarks/batching.py [--rounds 3] [--quick]

Batching: 32 requests at once against one at a time, plain and speculative, in one engine. Prefix: requests
that begin with the same tokens, as many as the model's context has room for up to 1024, with
enable_prefix_caching on and off; one at a time, and all at once. Everything runs in turn, round by
round; ratios are taken inside a round. --quick tries it out and keeps nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from measuring import write

from speculant import SamplingParams
from speculant.config import EngineConfig
from speculant.engine.build import Runtime, build_engine
from speculant.lab.bench.measuring import both_ways, interleave, measure, one_at_a_time, ratios, spreads, ways_of
from speculant.lab.bench.report import RATIOS
from speculant.lab.bench.runs import Bench, Mode, Run
from speculant.lab.bench.workloads import Workload, WorkloadConfig, code_prompt, make_workload

REQUESTS, TOKENS = 32, 48
SHARING, PREFIX, OWN, AFTER = 8, 1024, 16, 8  # requests, shared tokens, own prompt tokens, new tokens
BATCHING_FIGURES = ("tokens_per_s", "request_tokens_per_s", "ttft_s", "steps", "tokens_per_step",
                    "mean_acceptance_length", "preemptions", "peak_blocks")  # fmt: skip
PREFIX_FIGURES = ("seconds", "ttft_s", "steps", "prefix_hit_tokens", "peak_blocks")
PREDICTED = (
    "Together, 32 plain requests make 5 times the tokens/s of one at a time, with drafts 3 times: a draft fills the "
    "rows that a batch would. Speculation gives 1.4 one at a time and 0.8 together. One at a time, prefix caching "
    "saves all but the first of 8 prefills: 0.25 of the time. All at once it saves nothing in time, for all are "
    "admitted before the first has fed the prefix."
)


def build(arguments: argparse.Namespace, **changed: Any) -> Runtime:
    """Make the engine for the embedded pair, or another."""
    config = EngineConfig(arguments.model, dtype=arguments.dtype, max_num_seqs=REQUESTS)
    return build_engine(dataclasses.replace(config, **changed))


def batching(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Compare together with one at a time, both ways."""
    runtime = build(arguments, draft_model=arguments.draft_model, spec_length=arguments.spec_length)
    together = both_ways(SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), runtime.drafting)
    workload = make_workload(WorkloadConfig(num_prompts=REQUESTS), runtime, REQUESTS)
    ways = ways_of(Bench(runtime), {**together, **one_at_a_time(together)})
    case = measure(ways, workload, arguments.rounds, print)
    pairs = [(over, under) for over, under in RATIOS if over in case.runs and under in case.runs]
    return {
        "drafter": runtime.speculation,
        "requests": REQUESTS,
        "tokens_each": tokens,
        **{mode: figures(runs, BATCHING_FIGURES) for mode, runs in case.runs.items()},
        **{f"{over} / {under}": ratio(case.runs[over], case.runs[under], "tokens_per_s") for over, under in pairs},
        "identical_outputs": {mode: case.num_identical(mode) for mode in case.compared} | {"of": case.num_outputs},
    }


def shared_prefix(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare prefix caching on with off."""
    benches, mode = {}, Mode(SamplingParams(temperature=0, max_tokens=AFTER, ignore_eos=True))
    for name, caching in (("on", True), ("off", False)):
        runtime = build(arguments, enable_prefix_caching=caching)
        benches[name] = Bench(runtime)
    workload = sharing_workload(runtime)
    subjects = {}
    for name, bench in benches.items():
        bench.warm_up(workload, mode)
        subjects[f"{name}, one at a time"] = partial(bench.run, workload, dataclasses.replace(mode, sequential=True))
        subjects[f"{name}, all at once"] = partial(bench.run, workload, mode)
    runs = interleave(subjects, arguments.rounds, print)
    return {
        "requests": SHARING,
        "shared_tokens": len(workload.prompts[0]) - OWN,
        **{name: figures(each, PREFIX_FIGURES) for name, each in runs.items()},
        **{
            f"seconds, on / off, {how}": ratio(runs[f"on, {how}"], runs[f"off, {how}"], "seconds")
            for how in ("one at a time", "all at once")
        },
    }


def sharing_workload(runtime: Runtime) -> Workload:
    """Make prompts with the longest shared prefix that fits, up to PREFIX tokens."""
    shared = min(PREFIX, runtime.limits.max_model_len - OWN - AFTER)
    prefix = code_prompt(runtime.tokenizer, 0, shared)
    prompts = [[*prefix, *code_prompt(runtime.tokenizer, 1 + index, OWN)] for index in range(SHARING)]
    return Workload("shared prefix", prompts, [0.0] * SHARING)


def figures(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Return the quartiles of some figures over the rounds."""
    found = spreads([run.figures() for run in runs])
    return {name: dataclasses.asdict(found[name]) for name in names if name in found}


def ratio(over: Sequence[Run], under: Sequence[Run], name: str) -> Mapping[str, float]:
    """Return the quartiles of a figure's ratio, taken inside each round."""
    return dataclasses.asdict(ratios([run.figures() for run in over], [run.figures() for run in under])[name])


def main() -> None:
    """Measure and write results/batching.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--spec-length", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of few tokens; nothing is written")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    seen = {
        "batching": batching(arguments, 4 if arguments.quick else TOKENS),
        "shared prefix": shared_prefix(arguments),
    }
    if arguments.quick:
        print(json.dumps(seen, indent=2))
    else:
        write("batching", PREDICTED, seen)


if __name__ == "__main__":
    main()
