"""The price of a drafter before the first token: time to first token of a 1k-token prompt, with and without one.

    python benchmarks/first_token.py [--rounds 31] [--quick]

Two engines, one without a drafter and one with a model drafter, take the same prompt in turn; the prompt
is 1024 tokens, or as long as the model's context leaves room for. A model drafter that reads the
prompt no sooner than it drafts costs nothing up to the first token; what it then costs is in the
gap before the second. --quick tries it out and keeps nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from typing import Any

from measuring import write

from speculant import SamplingParams
from speculant.config import EngineConfig
from speculant.engine.build import Runtime, build_engine
from speculant.lab.bench.measuring import interleave, ratios, spreads
from speculant.lab.bench.runs import Bench, BenchRun, Mode
from speculant.lab.bench.workloads import Workload, code_prompt

PROMPT, TOKENS = 1024, 8  # tokens of the prompt, and to generate
WITHOUT, WITH = "without a drafter", "with a drafter"
PREDICTED = (
    "The ratio of the times to first token is 1.00, within 0.03. The gap before the second token is several times as "
    "long with the drafter, which reads the prompt then: about a fifth of the time to first token."
)


def build(arguments: argparse.Namespace) -> dict[str, Runtime]:
    """Make the two engines."""
    plain = EngineConfig(arguments.model, dtype=arguments.dtype, max_num_seqs=1)
    drafting = dataclasses.replace(plain, draft_model=arguments.draft_model, spec_length=arguments.spec_length)
    return {WITHOUT: build_engine(plain), WITH: build_engine(drafting)}


def make_workload(runtime: Runtime) -> Workload:
    """Make the one prompt."""
    length = min(PROMPT, runtime.limits.max_model_len - TOKENS)
    return Workload("code", [code_prompt(runtime.tokenizer, 0, length)], [0.0])


def figures(run: BenchRun) -> dict[str, float]:
    """Return the time to first token, and the first gap that took time: the one before the second token."""
    [timing] = run.timings
    assert timing.ttft_s is not None, "a run without tokens"
    return {"ttft_s": timing.ttft_s, "second_token_s": timing.gaps[0], "seconds": run.seconds}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both in turn and return quartiles, and those of the ratios inside each round."""
    engines = build(arguments)
    workload = make_workload(engines[WITHOUT])
    mode = Mode(SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    benches = {name: Bench(runtime) for name, runtime in engines.items()}
    for bench in benches.values():
        bench.warm_up(workload, mode)
    subjects = {name: partial(bench.run, workload, mode) for name, bench in benches.items()}
    runs = interleave(subjects, arguments.rounds, print)
    found = {name: [figures(run) for run in each] for name, each in runs.items()}
    return {
        "drafter": engines[WITH].speculation,
        "prompt_tokens": len(workload.prompts[0]),
        "rounds": arguments.rounds,
        **{name: quartiles(spreads(each)) for name, each in found.items()},
        "with / without": quartiles(ratios(found[WITH], found[WITHOUT])),
        "identical_outputs": all(a.outputs == b.outputs for a, b in zip(*runs.values(), strict=True)),
    }


def quartiles(found: dict[str, Any]) -> dict[str, Any]:
    """Return spreads as plain values."""
    return {name: dataclasses.asdict(spread) for name, spread in found.items()}


def main() -> None:
    """Measure and write results/first_token.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--spec-length", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="three rounds; nothing is written")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 3
    seen = measure(arguments)
    if arguments.quick:
        print(json.dumps(seen, indent=2))
    else:
        write("first_token", PREDICTED, seen)


if __name__ == "__main__":
    main()
