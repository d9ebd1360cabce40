"""`speculant bench compare`: several ways to draft for one model, and plain decoding, in the same run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from speculant.cli.flags import EngineFlags, accepts_flags, parse_mapping
from speculant.cli.generate import fetch
from speculant.cli.terminal import examples, progress
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench.workloads import CODE, WorkloadConfig, make_workload, require_room
from speculant.lab.cli.bench_io import (
    FEW,
    AsJson,
    BenchSampling,
    FewNumber,
    History,
    Lengths,
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
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from speculant.lab.bench.compare import Setting
    from speculant.lab.bench.measuring import BenchCase, Way
    from speculant.lab.bench.workloads import Workload

EXAMPLES = examples(
    "speculant bench compare demo --draft-model demo",
    "speculant bench compare ./llama --draft-model ./llama-small --length 2 --length 4 --length 8",
    "speculant bench compare ./llama --method ngram --method suffix --prompts spec_bench.jsonl --num-prompts 26",
    "speculant bench compare ./llama --draft-model ./llama-small --setting draft_quantization=int4 --setting"
    " verification=block --temperature 0.8",
    "speculant bench compare demo --draft-model demo --report compare.html",
)

Methods = Annotated[list[str] | None, typer.Option("--method", help="A way to draft; can be repeated.")]
DraftLengths = Annotated[
    list[int] | None,
    typer.Option("--length", help="Tokens to draft per step, for every method; can be repeated."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="KEY=VALUE,...",
        help="Another way: keys of the speculative config, or draft_quantization; can be repeated.",
    ),
]
Together = Annotated[bool, typer.Option("--together", help="Run the prompts together, max_num_seqs at a time.")]


@accepts_flags
def compare(
    target: Target = None,
    methods: Methods = None,
    lengths: DraftLengths = None,
    settings: Settings = None,
    prompts: Prompts = CODE,
    num_prompts: FewNumber = None,
    prompt_lengths: Lengths = None,
    together: Together = False,
    rounds: Rounds = 5,
    as_json: AsJson = False,
    report: Report = None,
    trace: Trace = None,
    history: History = None,
    *,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure several ways to draft, and plain decoding, in turn on the same prompts.

    A way is a method, a method with a draft length, or a setting. Each has its own engine; all share the model. If none
    is named, these are compared: the engine's default, the draft model alone if there is one, and the methods that
    look up drafts in text.

    The table shows the speed relative to plain decoding, measured with quartiles over the rounds and predicted by the
    formula, then tokens per pass, and accepted / tested draft tokens with their 95% interval.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} is not above 0", "use --rounds 5, or 1 for a quick look.")
    engine.name_model(target)
    config, params = EngineConfig.from_arguments(**engine.values()), sampling.params()
    if not together:
        config = replace(config, max_num_seqs=params.n)
    files = OutputFiles(report=report, trace=trace, history=history)
    tokens: Sequence[int | None] = prompt_lengths or [None]
    configs = [WorkloadConfig(prompts, num_prompts, length) for length in tokens]
    fetch(config)
    with progress("Loading the models"):
        chosen, ways = _build(config, methods or [], lengths or [], settings or [], params, together)
        runtime = next(iter(ways.values())).bench.runtime
        workloads = [make_workload(each, runtime, FEW) for each in configs]
    for workload in workloads:
        require_room(workload, params.max_tokens or 1, runtime.limits)
    cases = _measure(ways, workloads, rounds)
    from speculant.lab.bench.compare import compared

    value = compared(config, chosen, ways, cases)
    write_files(files, value, cases, [ways] * len(cases))
    show(value, as_json=as_json)


def _build(
    config: EngineConfig,
    methods: Sequence[str],
    lengths: Sequence[int],
    given: Sequence[str],
    params: SamplingParams,
    together: bool,
) -> tuple[list[Setting], dict[str, Way]]:
    from speculant.lab.bench.compare import build_ways, settings, usual_settings

    others = [parse_mapping("--setting", text) for text in given]
    chosen = settings(methods, lengths, others) or usual_settings(config)
    return chosen, build_ways(config, chosen, params, sequential=not together)


def _measure(ways: Mapping[str, Way], workloads: Sequence[Workload], rounds: int) -> list[BenchCase]:
    from speculant.lab.bench.measuring import measure

    with progress_of_runs(len(workloads) * len(ways) * rounds) as runs:
        return [measure(ways, workload, rounds, runs.begin, runs.show) for workload in workloads]
