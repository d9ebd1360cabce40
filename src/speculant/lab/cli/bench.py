"""`speculant bench`: measures plain and speculative decoding of a model, or of a server, in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from speculant.cli import (
    EngineFlags,
    Model,
    WholeSummaries,
    accepts_flags,
    accepts_log_level,
    command_group,
    examples,
    fetch,
    messages,
    parse_mapping,
    plain_table,
    print_json,
    profiling,
    progress,
    progress_of_parts,
    results,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench import CODE, WorkloadConfig, make_workload, require_room
from speculant.lab.cli import bench_quality, bench_serve
from speculant.lab.cli.bench_io import AsJson, BenchSampling, OutputFiles, OutputFlags, ReportFlags, shown_table
from speculant.lab.cli.progress import progress_of_runs

if TYPE_CHECKING:
    from speculant.lab.bench import BenchCase, Comparison, Way
    from speculant.params import SamplingParams

MANY, FEW = 32, 4  # default numbers of prompts that run together, and one at a time
THROUGHPUT_EXAMPLES = examples(
    "speculant bench throughput demo --draft-model demo",
    "speculant bench throughput demo --draft-model demo --num-prompts 32 --max-num-seqs 32 --sequential",
    "speculant bench throughput ./llama --draft-model ./llama-small --prompts random --prompt-length 512",
    "speculant bench throughput ./llama --prompts prompts.jsonl --request-rate 4 --json",
)
LATENCY_EXAMPLES = examples(
    "speculant bench latency demo --draft-model demo",
    "speculant bench latency demo --draft-model demo --prompt-length 64 --prompt-length 512 --max-tokens 64",
    "speculant bench latency ./llama --speculative-config method=ngram --prompts prompts.txt --json",
    "speculant bench latency ./llama --draft-model ./llama-small --prompts spec_bench.jsonl --num-prompts 26",
)
COMPARE_EXAMPLES = examples(
    "speculant bench compare demo --draft-model demo",
    "speculant bench compare ./llama --draft-model ./llama-small --length 2 --length 4 --length 8",
    "speculant bench compare ./llama --method ngram --method suffix --prompts spec_bench.jsonl --num-prompts 26",
    "speculant bench compare ./llama --draft-model ./llama-small --setting draft_quantization=int4 --setting"
    " verification=block --temperature 0.8",
    "speculant bench compare demo --draft-model demo --report compare.html",
)
SWEEP_EXAMPLES = examples(
    "speculant bench sweep demo --draft-model demo",
    "speculant bench sweep ./llama --draft-model ./llama-small --length 2 --length 4 --length 8 --rounds 5",
    "speculant bench sweep ./llama --draft-model ./llama-small --batch 1 --batch 4 --batch 16 --report sweep.html",
)
HISTORY_EXAMPLES = examples(
    "speculant bench latency demo --draft-model demo --history history.jsonl",
    "speculant bench history history.jsonl",
    "speculant bench history --json",
)
HISTORY = "benchmarks/results/history.jsonl"
EXIT_SLOWER = 1
STYLES = {"slower": "bold red", "faster": "bold green", "unchanged": None}
NAMES = ("throughput", "latency", "compare", "sweep", "serve", "history", "quality")
EXAMPLES = examples("speculant bench demo --draft-model demo", *(f"speculant bench {name} --help" for name in NAMES))

Prompts = Annotated[
    str,
    typer.Option(
        help="Built in: code, edit (code that begins again) or random (token ids)."
        " Or a file: a prompt per line, or JSON lines in the form of Spec-Bench."
    ),
]
Number = Annotated[int | None, typer.Option(help=f"How many prompts [default: {MANY}; all of a file].")]
FewNumber = Annotated[int | None, typer.Option(help=f"How many prompts [default: {FEW}; all of a file].")]
PromptLengths = Annotated[
    list[int] | None,
    typer.Option("--prompt-length", help="Tokens per prompt; can be repeated, each length is measured in turn."),
]
PromptLength = Annotated[int | None, typer.Option(help="Tokens per prompt.")]
Rate = Annotated[float | None, typer.Option(help="Prompts that arrive per second; left out, all come at once.")]
Rounds = Annotated[int, typer.Option(help="Runs of each mode.")]
Sequential = Annotated[bool, typer.Option("--sequential", help="Also run the prompts one at a time, to compare.")]
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
SweptLengths = Annotated[
    list[int] | None,
    typer.Option("--length", help="Tokens to draft per step; can be repeated. [default: 1, 2, 3, 4, 6, 8]"),
]
HistoryFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file that --history of bench commands wrote.")]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", help="Sequences that run at a time; can be repeated. [default: 1]"),
]


class ModelOrCommand(WholeSummaries):
    """Commands; a model in place of a command is measured by `latency`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        is_option = first.startswith("-") and first not in ("-h", "--help")
        named = is_option or first == "demo" or "/" in first or Path(first).exists()
        return super().parse_args(ctx, ["latency", *args] if named and first not in self.commands else args)


app = command_group(ModelOrCommand, epilog=EXAMPLES)


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

    def measure(self, ways: Mapping[str, Way], params: SamplingParams) -> list[BenchCase]:
        """Run each workload in all ways. Raises RequestError for one that does not fit."""
        from speculant.lab.bench import measure

        runtime = next(iter(ways.values())).bench.runtime
        workloads = [make_workload(each, runtime, self.usual_number) for each in self.workloads]
        for workload in workloads:
            require_room(workload, params.max_tokens or 1, runtime.limits)
        num_runs = len(workloads) * len(ways) * self.rounds
        with profiling(runtime.engine, self.files.profile), progress_of_runs(num_runs) as runs:
            return [measure(ways, workload, self.rounds, runs.begin, runs.show) for workload in workloads]


@app.callback()
def bench() -> None:
    """Measure how fast a model is on this machine, plain and speculative in the same run.

    Both modes run in turn, round by round. Medians, quartiles and their ratio are printed, and whether
    both gave the same tokens. Without a drafter only plain decoding is measured.

    `speculant bench MODEL` is `speculant bench latency MODEL`.
    """


@app.command("throughput", epilog=THROUGHPUT_EXAMPLES)
@accepts_log_level
@accepts_flags
def throughput(
    target: Model = None,
    prompts: Prompts = CODE,
    num_prompts: Number = None,
    prompt_lengths: PromptLengths = None,
    request_rate: Rate = None,
    rounds: Rounds = 5,
    sequential: Sequential = False,
    as_json: AsJson = False,
    *,
    output: OutputFlags,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure the tokens per second of many prompts that run together.

    It also shows steps, tokens per step, acceptance, preemptions, prompt tokens found in the prefix
    cache and the largest number of cache blocks in use. Each figure is a median over the rounds, with quartiles.
    """
    engine.name_model(target)
    configs = [WorkloadConfig(prompts, num_prompts, length, request_rate) for length in _each(prompt_lengths)]
    _run(Plan("throughput", configs, MANY, rounds, output.files(), alone_too=sequential), sampling, engine, as_json)


@app.command("latency", epilog=LATENCY_EXAMPLES)
@accepts_log_level
@accepts_flags
def latency(
    target: Model = None,
    prompts: Prompts = CODE,
    num_prompts: FewNumber = None,
    prompt_lengths: PromptLengths = None,
    rounds: Rounds = 5,
    as_json: AsJson = False,
    *,
    output: OutputFlags,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure one prompt at a time: time to the first token, between tokens, tokens per second.

    A step commits its tokens together, so with speculation many gaps are 0: the mean measures how fast
    the text grows, the percentiles how evenly.
    """
    engine.name_model(target)
    configs = [WorkloadConfig(prompts, num_prompts, length) for length in _each(prompt_lengths)]
    _run(Plan("latency", configs, FEW, rounds, output.files(), alone=True), sampling, engine, as_json)


def _each(prompt_lengths: list[int] | None) -> Sequence[int | None]:
    return prompt_lengths or [None]


def _run(plan: Plan, sampling: BenchSampling, engine: EngineFlags, as_json: bool) -> None:
    """Measure plain and speculative decoding by one engine."""
    from speculant.engine import build_engine
    from speculant.lab.bench import Bench, both_ways, document, one_at_a_time, ways_of

    config, params = EngineConfig.from_arguments(**engine.values()), sampling.params()
    fetch(config)
    with progress("Loading the models"):
        runtime = build_engine(config)
    modes = both_ways(params, runtime.drafting, sequential=plan.alone)
    ways = ways_of(Bench(runtime), {**modes, **one_at_a_time(modes)} if plan.alone_too else modes)
    cases = plan.measure(ways, params)
    value = document(plan.benchmark, config, runtime, cases)
    if plan.files.profile is not None:
        value["notes"].append("these figures were measured under the profiler, which slows steps down")
    _show(plan.files, value, cases, [ways] * len(cases), as_json)


@app.command("compare", epilog=COMPARE_EXAMPLES)
@accepts_log_level
@accepts_flags
def compare(
    target: Model = None,
    methods: Methods = None,
    lengths: DraftLengths = None,
    settings: Settings = None,
    prompts: Prompts = CODE,
    num_prompts: FewNumber = None,
    prompt_lengths: PromptLengths = None,
    together: Together = False,
    rounds: Rounds = 5,
    as_json: AsJson = False,
    *,
    output: ReportFlags,
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
    configs = [WorkloadConfig(prompts, num_prompts, length) for length in _each(prompt_lengths)]
    plan = Plan("compare", configs, FEW, rounds, output.files(), alone=not together)
    engine.name_model(target)
    config, params = EngineConfig.from_arguments(**engine.values()), sampling.params()
    if plan.alone:
        config = replace(config, max_num_seqs=params.n)
    others = [parse_mapping("--setting", text) for text in settings or []]
    fetch(config)
    with progress("Loading the models"):
        from speculant.lab.bench import build_ways, compared, settings as ways_named, usual_settings

        chosen = ways_named(methods or [], lengths or [], others) or usual_settings(config)
        ways = build_ways(config, chosen, params, sequential=plan.alone)
    cases = plan.measure(ways, params)
    value = compared(config, chosen, ways, cases)
    _show(plan.files, value, cases, [ways] * len(cases), as_json)


@app.command("sweep", epilog=SWEEP_EXAMPLES)
@accepts_log_level
@accepts_flags
def sweep(
    target: Model = None,
    lengths: SweptLengths = None,
    batches: Batches = None,
    prompts: Prompts = CODE,
    num_prompts: FewNumber = None,
    prompt_length: PromptLength = None,
    rounds: Rounds = 3,
    as_json: AsJson = False,
    *,
    output: ReportFlags,
    sampling: BenchSampling,
    engine: EngineFlags,
) -> None:
    """Measure and predict a draft model's speed over plain decoding, by draft length and batch size.

    The prediction comes first, from the acceptance rate on the target's own texts for these prompts and the time of
    steps with drafts of these lengths. Then plain decoding and all lengths run in turn. Batches are always full, so the
    number of prompts is rounded up to a multiple of the batch size. The draft's weights stay as they are unless
    --draft-quantization names a type.
    """
    from speculant.lab.bench import (
        BATCHES,
        LENGTHS,
        PLAIN,
        SweepPlan,
        chains_of,
        measure_sweep,
        predict_sweep,
        sweep_params,
        swept,
        way_of,
    )

    engine.name_model(target)
    given, files = EngineConfig.from_arguments(**engine.values()), output.files()
    config, params = chains_of(given), sweep_params(sampling.params())
    plan = SweepPlan(
        WorkloadConfig(prompts, num_prompts, prompt_length),
        FEW,
        tuple(lengths or LENGTHS),
        tuple(batches or BATCHES),
        rounds,
    )
    fetch(config)
    with progress_of_parts() as parts:
        predicted = predict_sweep(config, plan, params, parts.begin)
    with progress_of_runs(plan.num_runs) as runs:
        found = measure_sweep(predicted, plan, params, runs.begin, runs.show)
    value = swept(config, plan, found)
    best = [way_of(case["best"]["found"]["length"]) for case in value["cases"]]
    shown = [{name: each.ways[name] for name in (PLAIN, way)} for each, way in zip(found, best, strict=True)]
    _show(files, value, [each.case for each in found], shown, as_json)


app.command("serve", epilog=bench_serve.EXAMPLES)(accepts_log_level(bench_serve.serve))


@app.command("history", epilog=HISTORY_EXAMPLES)
@accepts_log_level
def history(path: HistoryFile = Path(HISTORY), as_json: AsJson = False) -> None:
    """Compare the newest run of each benchmark with the earlier ones, and say what became slower.

    It compares ratios of one command on one machine: the newest run with the median of the earlier ones. A figure is
    slower if its quartiles lie below the quartiles of a typical run, and below the quartiles of the runs' medians. The
    exit code is 1 if any figure is slower.
    """
    from speculant.lab.bench import compare_entries, read

    benchmarks = [_compared(each) for each in compare_entries(read(path))]
    slower = [change for each in benchmarks for change in each["figures"] if change["verdict"] == "slower"]
    if as_json:
        print_json({"file": str(path), "benchmarks": benchmarks})
    else:
        _show_history(benchmarks, slower)
    if slower:
        raise typer.Exit(EXIT_SLOWER)


def _compared(comparison: Comparison) -> dict[str, Any]:
    entry = comparison.entry
    return {
        "command": entry.command,
        "date": entry.date,
        "revision": entry.revision,
        "machine": dict(entry.machine),
        "earlier": comparison.num_earlier,
        "figures": [
            {**asdict(change), "ratio": change.ratio, "verdict": change.verdict} for change in comparison.changes
        ],
    }


def _show_history(benchmarks: Sequence[Mapping[str, Any]], slower: Sequence[Mapping[str, Any]]) -> None:
    from speculant.lab.bench import cell

    console = results()
    for each in benchmarks:
        console.print(f"{each['command']}", style="bold")
        console.print(f"revision {each['revision']} of {each['date']}, compared with {each['earlier']} earlier runs")
        if not each["figures"]:
            console.print("nothing to compare with\n")
            continue
        rows = [
            [row["figure"], cell(row["before"]), cell(row["now"]), f"{row['ratio']:.2f}", row["verdict"]]
            for row in each["figures"]
        ]
        styles = [STYLES[row["verdict"]] for row in each["figures"]]
        table = plain_table(("", "before", "now", "now / before", ""), rows, styles=styles)
        console.print(table)
        console.print()
    named = ", ".join(f"{change['figure']} ({change['ratio']:.2f})" for change in slower)
    console.print(f"slower: {named}" if slower else "nothing became slower")


app.command("quality", epilog=bench_quality.EXAMPLES)(accepts_log_level(bench_quality.quality))


def _show(
    files: OutputFiles,
    value: Mapping[str, Any],
    cases: Sequence[BenchCase],
    ways: Sequence[Mapping[str, Way]],
    as_json: bool,
) -> None:
    """Write the requested files, and print a document of `lab.bench.report`."""
    from speculant.lab.bench import conclusions, heading, tables

    for path in files.write(value, cases, ways):
        messages().print(f"written: {path}", style="dim")
    if as_json:
        print_json(value)
        return
    console, speculation = results(), value["speculation"]
    console.print(f"speculation is {'on' if speculation['on'] else 'off'}: {speculation['detail']}")
    for case in value["cases"]:
        console.print(f"\n{heading(case)}\n", style="bold")
        for table in tables(value["benchmark"], case):
            console.print(shown_table(table))
            console.print()
        for line in conclusions(case):
            console.print(line)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")
