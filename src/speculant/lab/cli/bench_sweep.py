"""`speculant bench sweep`: a draft model's speed by draft length and batch size, measured and predicted."""

from __future__ import annotations

from typing import Annotated

import typer

from speculant.cli.flags import EngineFlags, accepts_flags
from speculant.cli.generate import fetch
from speculant.cli.terminal import examples, progress_of_parts
from speculant.config import EngineConfig
from speculant.lab.bench.workloads import CODE, WorkloadConfig
from speculant.lab.cli.bench_io import (
    FEW,
    AsJson,
    BenchSampling,
    FewNumber,
    History,
    OutputFiles,
    Prompts,
    Report,
    Rounds,
    Target,
    Trace,
    show,
    write_files,
)
from speculant.lab.cli.progress import progress_of_runs

EXAMPLES = examples(
    "speculant bench sweep demo --draft-model demo",
    "speculant bench sweep ./llama --draft-model ./llama-small --length 2 --length 4 --length 8 --rounds 5",
    "speculant bench sweep ./llama --draft-model ./llama-small --batch 1 --batch 4 --batch 16 --report sweep.html",
)

DraftLengths = Annotated[
    list[int] | None,
    typer.Option("--length", help="Tokens to draft per step; can be repeated. [default: 1, 2, 3, 4, 6, 8]"),
]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", help="Sequences that run at a time; can be repeated. [default: 1]"),
]
PromptLength = Annotated[int | None, typer.Option(help="Tokens per prompt.")]


@accepts_flags
def sweep(
    target: Target = None,
    lengths: DraftLengths = None,
    batches: Batches = None,
    prompts: Prompts = CODE,
    num_prompts: FewNumber = None,
    prompt_length: PromptLength = None,
    rounds: Rounds = 3,
    as_json: AsJson = False,
    report: Report = None,
    trace: Trace = None,
    history: History = None,
    *,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure and predict a draft model's speed over plain decoding, by draft length and batch size.

    The prediction comes first, from the acceptance rate on the target's own texts for these prompts and the time of
    steps with drafts of these lengths. Then plain decoding and all lengths run in turn. Batches are always full, so the
    number of prompts is rounded up to a multiple of the batch size. The draft's weights stay as they are unless
    --draft-quantization names a type.
    """
    from speculant.lab.bench import sweep as sweeping
    from speculant.lab.bench.measuring import PLAIN

    engine.name_model(target)
    given, files = EngineConfig.from_arguments(**engine.values()), OutputFiles(None, report, trace, history)
    config, params = sweeping.chains_of(given), sweeping.sweep_params(sampling.params())
    plan = sweeping.SweepPlan(
        WorkloadConfig(prompts, num_prompts, prompt_length),
        FEW,
        tuple(lengths or sweeping.LENGTHS),
        tuple(batches or sweeping.BATCHES),
        rounds,
    )
    fetch(config)
    with progress_of_parts() as parts:
        predicted = sweeping.predict_sweep(config, plan, params, parts.begin)
    with progress_of_runs(plan.num_runs) as runs:
        found = sweeping.measure_sweep(predicted, plan, params, runs.begin, runs.show)
    value = sweeping.swept(config, plan, found)
    best = [sweeping.way_of(case["best"]["found"]["length"]) for case in value["cases"]]
    shown = [{name: each.ways[name] for name in (PLAIN, way)} for each, way in zip(found, best, strict=True)]
    write_files(files, value, [each.case for each in found], shown)
    show(value, as_json=as_json)
