"""`speculant bench`: measures plain and speculative decoding of a model, or of a server, in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculant.bench.outputs import OutputFiles
from speculant.bench.workloads import CODE, WorkloadConfig, make_workload, require_room
from speculant.cli import bench_serve
from speculant.cli.flags import BenchSampling, EngineFlags, SamplingFlags, accepts_flags
from speculant.cli.generate import fetch
from speculant.cli.logs import accepts_log_level
from speculant.cli.profile import Profile, profiling
from speculant.cli.terminal import examples, messages, print_json, progress, progress_of_runs, results
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.params import SamplingParams

if TYPE_CHECKING:
    from speculant.bench.measuring import Case
    from speculant.bench.runs import Mode
    from speculant.bench.workloads import Workload
    from speculant.engine.build import Runtime

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
)
EXAMPLES = examples(*(f"speculant bench {name} --help" for name in ("throughput", "latency", "serve")))
MANY, FEW = 32, 4  # default numbers of prompts of the two benchmarks

app = typer.Typer(no_args_is_help=True)
app.command("serve", epilog=bench_serve.EXAMPLES)(accepts_log_level(bench_serve.serve))


@app.callback()
def bench() -> None:
    """Measure how fast a model is on this machine, plain and speculative in the same run.

    Both modes run in turn, round by round. Medians, quartiles and their ratio are printed, and whether
    both gave the same tokens. Without a drafter only plain decoding is measured.
    """


Prompts = Annotated[str, typer.Option(help="code (built in), random (token ids), or a file with one prompt a line.")]
Number = Annotated[int | None, typer.Option(help=f"How many prompts [default: {MANY}; all of a file].")]
FewNumber = Annotated[int | None, typer.Option(help=f"How many prompts [default: {FEW}; all of a file].")]
Lengths = Annotated[
    list[int] | None, typer.Option("--prompt-length", help="Tokens per prompt; repeated, each is measured in turn.")
]
Rate = Annotated[float | None, typer.Option(help="Prompts that arrive per second; left out, all come at once.")]
Rounds = Annotated[int, typer.Option(help="How often each way is run.")]
Sequential = Annotated[bool, typer.Option("--sequential", help="Run the prompts one at a time too, to compare.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write the figures with charts here, as one HTML file.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Write the phases of the steps of one prompt here, for ui.perfetto.dev.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything that was measured as JSON.")]


@dataclass(frozen=True)
class Plan:
    """The settings of a benchmark. `alone`: prompts run one at a time; `alone_too`: in both ways."""

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
    *,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure the tokens per second of many prompts that run together.

    Also: steps, tokens per step, acceptance, preemptions, prompt tokens found in the prefix cache and
    the largest number of cache blocks in use. A figure is its median over the rounds, with quartiles.
    """
    configs = [WorkloadConfig(prompts, num_prompts, length, request_rate) for length in _each(prompt_lengths)]
    files = OutputFiles(profile, report, trace)
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
    *,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure one prompt at a time: time to the first token, between tokens, tokens per second.

    A step commits its tokens together, so with speculation many gaps are 0: the mean measures how fast
    the text grows, the percentiles how evenly.
    """
    configs = [WorkloadConfig(prompts, num_prompts, length) for length in _each(prompt_lengths)]
    files = OutputFiles(profile, report, trace)
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
        require_room(workload, params.max_tokens or 1, runtime.limits.max_model_len)
    modes = _modes(plan, params, runtime.drafting)
    cases = _measure(plan, runtime, workloads, modes)
    value = _document(plan, config, runtime, cases)
    for path in plan.files.write(value, cases, runtime, modes):
        messages().print(f"written: {path}", style="dim")
    if as_json:
        print_json(value)
    else:
        _show(plan.benchmark, value)


def _build(config: EngineConfig) -> Runtime:
    from speculant.engine.build import build_engine

    return build_engine(config)


def _modes(plan: Plan, params: SamplingParams, drafting: bool) -> dict[str, Mode]:
    from speculant.bench.measuring import both_ways, one_at_a_time

    modes = both_ways(params, drafting, sequential=plan.alone)
    return {**modes, **one_at_a_time(modes)} if plan.alone_too else modes


def _measure(plan: Plan, runtime: Runtime, workloads: Sequence[Workload], modes: Mapping[str, Mode]) -> list[Case]:
    from speculant.bench.measuring import measure
    from speculant.bench.runs import Bench

    bench = Bench(runtime)
    num_runs = len(workloads) * len(modes) * plan.rounds
    with profiling(runtime.engine, plan.files.profile), progress_of_runs(num_runs) as notify:
        return [measure(bench, workload, modes, plan.rounds, notify) for workload in workloads]


def _document(plan: Plan, config: EngineConfig, runtime: Runtime, cases: Sequence[Case]) -> dict[str, Any]:
    from speculant.bench.report import document

    value = document(plan.benchmark, config, runtime, cases)
    if plan.files.profile is not None:
        value["notes"].append("these figures were measured under the profiler, which slows steps down")
    return value


def _show(benchmark: str, value: Mapping[str, Any]) -> None:
    from speculant.bench.report import conclusions, heading, tables

    console, speculation = results(), value["speculation"]
    console.print(f"speculation is {'on' if speculation['on'] else 'off'}: {speculation['detail']}")
    for case in value["cases"]:
        console.print(f"\n{heading(case)}\n", style="bold")
        for table in tables(benchmark, case):
            console.print(table)
            console.print()
        for line in conclusions(case):
            console.print(line)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")
