"""Time to the first token of a 1k-token prompt, with a model drafter and without a drafter.

Two engines take the same prompt in turn: 1,024 tokens, or as many as the model's context has room for. A model drafter
reads the prompt when it first drafts, so it adds nothing before the first token and adds to the gap before the second.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from speculant import SamplingParams
from speculant.config import EngineConfig
from speculant.engine import build_engine
from speculant.lab.bench import (
    Bench,
    Benchmark,
    BenchRun,
    Mode,
    Workload,
    code_prompt,
    interleave,
    plain_values,
    ratios,
    spreads,
)

PROMPT, TOKENS = 1024, 8  # tokens of the prompt, and to generate
WITHOUT, WITH = "without a drafter", "with a drafter"


def figures(run: BenchRun) -> dict[str, float]:
    """Return the time to the first token, and the gap before the second one."""
    [timing] = run.timings
    assert timing.ttft_s is not None, "a run without tokens"
    return {"ttft_s": timing.ttft_s, "second_token_s": timing.gaps[0], "seconds": run.seconds}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run both engines in turn."""
    plain = EngineConfig(arguments.model, dtype=arguments.dtype, max_num_seqs=1)
    drafting = dataclasses.replace(plain, draft_model=arguments.draft_model, spec_length=arguments.spec_length)
    benches = {WITHOUT: Bench(build_engine(plain)), WITH: Bench(build_engine(drafting))}
    runtime = benches[WITH].runtime
    prompt = code_prompt(runtime.tokenizer, 0, min(PROMPT, runtime.limits.max_model_len - TOKENS))
    workload, mode = Workload("code", [prompt]), Mode(SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    for bench in benches.values():
        bench.warm_up(workload, mode)
    subjects = {name: partial(bench.run, workload, mode) for name, bench in benches.items()}
    runs = interleave(subjects, arguments.rounds, print)
    found = {name: [figures(run) for run in each] for name, each in runs.items()}
    yield {
        "drafter": runtime.speculation,
        "prompt_tokens": len(prompt),
        "rounds": arguments.rounds,
        **{name: plain_values(spreads(each)) for name, each in found.items()},
        "with / without": plain_values(ratios(found[WITH], found[WITHOUT])),
        "identical_outputs": all(a.outputs == b.outputs for a, b in zip(*runs.values(), strict=True)),
    }


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="The ratio of the times to first token is 1.00, within 0.03. The gap before the second token is "
    "several times as long with the drafter, which reads the prompt then: about a fifth of the time to first token.",
    measure=measure, rounds=31,
    options={"model": "demo", "draft_model": "demo", "spec_length": 3, "dtype": "float32"},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
