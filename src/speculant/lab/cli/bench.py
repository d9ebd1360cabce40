"""`speculant bench`: measures plain and speculative decoding of a model, or of a server, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.cli.flags import EngineFlags, Profile, SamplingFlags, accepts_flags, accepts_log_level, profiling
from speculant.cli.generate import fetch
from speculant.cli.terminal import command_group, examples, progress
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench.workloads import CODE, WorkloadConfig, make_workload, require_room
from speculant.lab.cli import bench_compare, bench_history, bench_quality, bench_serve, bench_sweep
from speculant.lab.cli.bench_io import (
    FEW,
    MANY,
    AsJson,
    BenchSampling,
    FewNumber,
    History,
    Lengths,
    Number,
    OutputFiles,
    Prompts,
    Report,
    Rounds,
    Trace,
    show,
    write_files,
)
from speculant.lab.cli.progress import progress_of_runs
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.engine.build import Runtime
    from speculant.lab.bench.measuring import BenchCase, Way
    from speculant.lab.bench.workloads import Workload

THROUGHPUT_EXAMPLES = examples(
    "speculant bench throughput --model demo --draft-model demo",
    "speculant bench throughput --model demo --draft-model demo --num-prompts 32 --max-num-seqs 32 --sequential",
    "speculant bench throughput --model ./llama --draft-model ./llama-small --prompts random --prompt-length 512",
    "speculant bench throughput --model ./llama --prompts prompts.jsonl --request-rate 4 --json",
)
LATENCY_EXAMPLES = examples(
    "speculant bench latency --model demo --draft-model demo",
    "speculant bench latency --model demo --draft-model demo --prompt-length 64 --prompt-length 512 --max-tokens 64",
    "speculant bench latency --model ./llama --speculative-config method=ngram --prompts prompts.txt --json",
    "speculant bench latency --model ./llama --draft-model ./llama-small --prompts spec_bench.jsonl --num-prompts 26",
)
OTHERS: Mapping[str, tuple[Callable[..., None], str]] = {
    "compare": (bench_compare.compare, bench_compare.EXAMPLES),
    "sweep": (bench_sweep.sweep, bench_sweep.EXAMPLES),
    "serve": (bench_serve.serve, bench_serve.EXAMPLES),
    "history": (bench_history.history, bench_history.EXAMPLES),
    "quality": (bench_quality.quality, bench_quality.EXAMPLES),
}
EXAMPLES = examples(*(f"speculant bench {name} --help" for name in ("throughput", "latency", *OTHERS)))

app = command_group(epilog=EXAMPLES)
for _name, (_command, _examples) in OTHERS.items():
    app.command(_name, epilog=_examples)(accepts_log_level(_command))


@app.callback()
def bench() -> None:
    """Measure how fast a model is on this machine, plain and speculative in the same run.

    Both modes run in turn, round by round. Medians, quartiles and their ratio are printed, and whether
    both gave the same tokens. Without a drafter only plain decoding is measured.
    """


Rate = Annotated[float | None, typer.Option(help="Prompts that arrive per second; left out, all come at once.")]
Sequential = Annotated[bool, typer.Option("--sequential", help="Also run the prompts one at a time, to compare.")]


@dataclass(frozen=True)
class Plan:
    """The settings of a benchmark. alone: prompts run one at a time. alone_too: once together, once one at a time."""

    benchmark: str
    workloads: Sequence[WorkloadConfig]
    usual_number: int
    rounds: int
    files: OutputFiles
    alone: bool = False
    alone_too: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} is not above 0", "use --rounds 5, or 1 for a quick look.")


@app.command("throughput", epilog=THROUGHPUT_EXAMPLES)
@accepts_log_level
@accepts_flags
def throughput(
    prompts: Prompts = CODE,
    num_prompts: Number = None,
    prompt_lengths: Lengths = None,
    request_rate: Rate = None,
    rounds: Rounds = 5,
    sequential: Sequential = False,
    as_json: AsJson = False,
    profile: Profile = None,
    report: Report = None,
    trace: Trace = None,
    history: History = None,
    *,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure the tokens per second of many prompts that run together.

    It also shows steps, tokens per step, acceptance, preemptions, prompt tokens found in the prefix
    cache and the largest number of cache blocks in use. Each figure is a median over the rounds, with quartiles.
    """
    configs = [WorkloadConfig(prompts, num_prompts, length, request_rate) for length in _each(prompt_lengths)]
    files = OutputFiles(profile, report, trace, history)
    _run(Plan("throughput", configs, MANY, rounds, files, alone_too=sequential), sampling, engine, as_json)


@app.command("latency", epilog=LATENCY_EXAMPLES)
@accepts_log_level
@accepts_flags
def latency(
    prompts: Prompts = CODE,
    num_prompts: FewNumber = None,
    prompt_lengths: Lengths = None,
    rounds: Rounds = 5,
    as_json: AsJson = False,
    profile: Profile = None,
    report: Report = None,
    trace: Trace = None,
    history: History = None,
    *,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure one prompt at a time: time to the first token, between tokens, tokens per second.

    A step commits its tokens together, so with speculation many gaps are 0: the mean measures how fast
    the text grows, the percentiles how evenly.
    """
    configs = [WorkloadConfig(prompts, num_prompts, length) for length in _each(prompt_lengths)]
    files = OutputFiles(profile, report, trace, history)
    _run(Plan("latency", configs, FEW, rounds, files, alone=True), sampling, engine, as_json)


def _each(prompt_lengths: list[int] | None) -> Sequence[int | None]:
    return prompt_lengths or [None]


def _run(plan: Plan, sampling: SamplingFlags, engine: EngineFlags, as_json: bool) -> None:
    config, params = EngineConfig.from_arguments(**engine.values()), sampling.params()
    fetch(config)
    with progress("Loading the models"):
        runtime = _build(config)
    workloads = [make_workload(each, runtime, plan.usual_number) for each in plan.workloads]
    for workload in workloads:
        require_room(workload, params.max_tokens or 1, runtime.limits)
    ways = _ways(plan, params, runtime)
    cases = _measure(plan, runtime, workloads, ways)
    value = _document(plan, config, runtime, cases)
    write_files(plan.files, value, cases, [ways] * len(cases))
    show(value, as_json=as_json)


def _build(config: EngineConfig) -> Runtime:
    from speculant.engine.build import build_engine

    return build_engine(config)


def _ways(plan: Plan, params: SamplingParams, runtime: Runtime) -> dict[str, Way]:
    from speculant.lab.bench.measuring import Bench, both_ways, one_at_a_time, ways_of

    modes = both_ways(params, runtime.drafting, sequential=plan.alone)
    return ways_of(Bench(runtime), {**modes, **one_at_a_time(modes)} if plan.alone_too else modes)


def _measure(plan: Plan, runtime: Runtime, workloads: Sequence[Workload], ways: Mapping[str, Way]) -> list[BenchCase]:
    from speculant.lab.bench.measuring import measure

    num_runs = len(workloads) * len(ways) * plan.rounds
    with profiling(runtime.engine, plan.files.profile), progress_of_runs(num_runs) as runs:
        return [measure(ways, workload, plan.rounds, runs.begin, runs.show) for workload in workloads]


def _document(plan: Plan, config: EngineConfig, runtime: Runtime, cases: Sequence[BenchCase]) -> dict[str, Any]:
    from speculant.lab.bench.report import document

    value = document(plan.benchmark, config, runtime, cases)
    if plan.files.profile is not None:
        value["notes"].append("these figures were measured under the profiler, which slows steps down")
    return value
