"""`speculant plan`: which draft length pays, from an acceptance rate and the costs of draft and verification."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli import (
    FlagGroup,
    Parts,
    accepts_flags,
    accepts_log_level,
    command_group,
    examples,
    print_json,
    progress_of_parts,
    results,
)
from speculant.errors import ConfigError
from speculant.lab.fleet import FleetConfig, ReplicaLimits, Routing, Scaling, TrafficConfig
from speculant.params import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from speculant.lab.fleet import Arrival, EngineCosts
    from speculant.lab.theory import VerificationCurve

EXAMPLES = examples(
    "speculant plan --alpha 0.8 --cost-ratio 0.05",
    "speculant plan --alpha 0.9,0.85,0.8 --cost-ratio 0.1 --max-length 8 --json",
    "speculant plan --alpha 0.8 --cost-ratio 0.05 --verify-curve curve.json --batch 8",
    "speculant plan --alpha 0.7 --cost-ratio 0.05 --tokens 128 --correlation 0.3",
    "speculant check-pair demo demo --json > pair.json",
    "speculant plan --verify-curve pair.json",
)
ANSWERS = 1000  # to simulate
LONGEST_ANSWER = 4096
SPREAD = (2.5, 97.5)  # percentiles
BAR = 32  # characters of the longest bar
BEST = "bold green"  # style
ANSWER = "answers of {tokens} tokens: {mean:.2f} times, 95% of them {low:.2f} to {high:.2f}"

Alpha = Annotated[str | None, typer.Option(help="Acceptance rate, 0 to 1; or one per depth: 0.9,0.8,0.7.")]
CostRatio = Annotated[float | None, typer.Option(help="Time of a draft pass / a target pass of one row.")]
Curve = Annotated[
    Path | None,
    typer.Option(
        help="JSON file: cost of a target pass by its tokens, or a report of check-pair [default: tokens add no cost]."
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences that step together; the target's pass has this many rows or more.")]
MaxLength = Annotated[int, typer.Option(help="The longest draft in the table.")]
OperationsRatio = Annotated[
    float | None,
    typer.Option(help="Operations per token, draft / target [default: the cost ratio]."),
]
Tokens = Annotated[
    int | None, typer.Option(help="Simulate answers of this many tokens, and print how much their speed varies.")
]
Correlation = Annotated[
    float,
    typer.Option(help="Correlation of acceptance between neighbouring tokens in simulated answers; 0 = independent."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@dataclass(frozen=True)
class Assumptions:
    """The input of a plan. alpha: acceptance rates by depth, the last one for all greater depths.

    tokens: the length of simulated answers, whose acceptance has this correlation; None = no simulation.
    """

    alpha: Sequence[float]
    cost_ratio: float
    operations_ratio: float
    batch: int
    max_length: int
    verify_curve: str | None
    tokens: int | None = None
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= rate <= 1 for rate in self.alpha):
            raise ConfigError(f"alpha={list(self.alpha)} is not between 0 and 1", "use for example --alpha 0.8.")
        for name in ("cost_ratio", "operations_ratio"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value} is not a number of 0 or more", "use for example 0.05.")
        if self.batch < 1:
            raise ConfigError(f"batch={self.batch} is not above 0", "use --batch 1 or more.")
        if not 1 <= self.max_length <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"max_length={self.max_length} is not between 1 and {MAX_SPECULATIVE_TOKENS}", "use --max-length 16."
            )
        self._check_simulation()

    def _check_simulation(self) -> None:
        if self.tokens is not None and not 1 <= self.tokens <= LONGEST_ANSWER:
            raise ConfigError(f"tokens={self.tokens} is not between 1 and {LONGEST_ANSWER}", "use --tokens 128.")
        if not 0 <= self.correlation < 1:
            raise ConfigError(f"correlation={self.correlation} is not from 0 to below 1", "use --correlation 0.3.")
        if self.correlation and self.tokens is None:
            raise ConfigError("a correlation applies to simulated answers alone", "add --tokens 128.")


app = command_group(no_args_is_help=False, invoke_without_command=True)


@app.callback(epilog=EXAMPLES)
@accepts_log_level
def plan(
    context: typer.Context,
    alpha: Alpha = None,
    cost_ratio: CostRatio = None,
    verify_curve: Curve = None,
    batch: Batch = 1,
    max_length: MaxLength = 16,
    operations_ratio: OperationsRatio = None,
    tokens: Tokens = None,
    correlation: Correlation = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compute the best draft length, its speed and its extra operations.

    Speed is relative to plain decoding: tokens per pass / (length x cost ratio + cost of the pass). The oracle
    chooses each length with foresight, so no other choice of lengths is faster. These figures are for long
    texts whose tokens are accepted independently; --tokens simulates answers of a finite length, with the best
    draft length. `speculant check-pair` measures alpha, the cost ratio, the curve and the correlation of a draft
    model or a head on this machine; give its JSON output as --verify-curve, which sets alpha and the cost ratio too.
    """
    if context.invoked_subcommand is not None:
        return
    measured_rates, measured_ratio = read_pair(verify_curve)
    rates = measured_rates if alpha is None else read_rates(alpha)
    ratio = measured_ratio if cost_ratio is None else cost_ratio
    if rates is None or ratio is None:
        missing = "acceptance rate" if rates is None else "cost ratio"
        raise ConfigError(
            f"no {missing} was given",
            "add --alpha 0.8 --cost-ratio 0.05; `speculant check-pair TARGET DRAFT` measures both.",
        )
    operations = ratio if operations_ratio is None else operations_ratio
    file = None if verify_curve is None else str(verify_curve)
    given = Assumptions(rates, ratio, operations, batch, max_length, file, tokens, correlation)
    value = document(given, read_curve(verify_curve))
    if as_json:
        print_json(value)
    else:
        _show(results(), value)


def document(given: Assumptions, curve: VerificationCurve) -> dict[str, Any]:
    """Return the plan as `--json` prints it."""
    from speculant.lab.theory import (
        best_length,
        expected_tokens,
        least_acceptance,
        operations,
        oracle_speedup,
        speedups,
        step_costs,
        survival,
    )

    reached = survival(given.alpha, given.max_length)
    costs = step_costs(given.cost_ratio, curve, given.max_length, given.batch)
    speeds, tokens, extra = (
        speedups(reached, costs),
        expected_tokens(reached),
        operations(reached, given.operations_ratio),
    )
    ahead = survival(given.alpha, MAX_SPECULATIVE_TOKENS)
    best = best_length(speeds)
    return {
        "settings": asdict(given),
        "lengths": [
            {
                "length": length,
                "tokens_per_pass": float(tokens[length]),
                "cost": float(costs[length]),
                "speed": float(speeds[length]),
                "operations": float(extra[length]),
            }
            for length in range(given.max_length + 1)
        ],
        "best_length": best,
        "best_speed": float(speeds[best]),
        "oracle_speed": oracle_speedup(ahead, given.cost_ratio, curve, given.batch),
        "least_alpha": least_acceptance(costs),
        "answers": _simulated(given, costs[: best + 1].tolist()),
        "notes": ["the best length is the longest in this table: raise --max-length"]
        if best == given.max_length
        else [],
    }


def _simulated(given: Assumptions, costs: Sequence[float]) -> dict[str, float] | None:
    """Return the mean and the spread of the speed of simulated answers, with drafts of the last length in `costs`."""
    import numpy as np

    from speculant.lab.theory import simulate

    if given.tokens is None:
        return None
    rng = np.random.default_rng(0)
    found = simulate(given.alpha, costs, given.tokens, ANSWERS, rng, given.correlation)
    low, high = np.percentile(found.speeds, SPREAD)
    return {"mean": float(given.tokens / found.cost.mean()), "low": float(low), "high": float(high)}


def _show(console: Console, value: Mapping[str, Any]) -> None:
    console.print(_heading(value["settings"]), style="bold")
    console.print(_table(value))
    for line in _conclusions(value):
        console.print(line)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")


def _heading(settings: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{rate:g}" for rate in settings["alpha"])
    together = "" if settings["batch"] == 1 else f", {settings['batch']} sequences together"
    curve = settings["verify_curve"]
    verifying = f"verification as in {curve}" if curve else "verification as fast as one token"
    return f"alpha {rates}; a draft pass costs {settings['cost_ratio']:g} target passes; {verifying}{together}"


def _table(value: Mapping[str, Any]) -> Table:
    """Return a row per length, with a bar as long as its speed."""
    table = Table(box=None, pad_edge=False)
    for heading in ("length", "tokens/pass", "speed", "operations"):
        table.add_column(heading, justify="right")
    table.add_column("")
    table.add_column("", no_wrap=True)
    unit = BAR / value["best_speed"]
    for row in value["lengths"]:
        is_best = row["length"] == value["best_length"]
        figures = [f"{row[name]:.2f}" for name in ("tokens_per_pass", "speed", "operations")]
        bar = "#" * max(1, round(unit * row["speed"]))
        table.add_row(str(row["length"]), *figures, "best" if is_best else "", bar, style=BEST if is_best else None)
    return table


def _conclusions(value: Mapping[str, Any]) -> list[str]:
    length, least = value["best_length"], value["least_alpha"]
    best = value["lengths"][length]
    answers, tokens = value["answers"], value["settings"]["tokens"]
    choice = (
        f"best length: {length}, {best['speed']:.2f} times the speed of plain decoding, "
        f"{best['operations']:.2f} times its operations"
    )
    nothing = "best length: 0; no draft of these lengths is faster than plain decoding"
    never = "drafts would not pay even if all tokens were accepted"
    return [
        choice if length else nothing,
        never if least is None else f"drafts pay where alpha is above {least:.3f}",
        f"oracle: {value['oracle_speed']:.2f} times, if accepted tokens were known in advance",
        *(() if answers is None else [ANSWER.format(tokens=tokens, **answers)]),
    ]


LARGEST = 1e9  # of counts and costs
FORMS = 'write {"1": 1.0, "2": 1.03, ...} or {"tokens": [1, 2, ...], "cost": [1.0, 1.03, ...]}.'


def read_rates(text: str) -> list[float]:
    """Read a number, or numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--alpha {text!r} is not a number", "use --alpha 0.8, or one per depth: 0.9,0.8.") from None


def read_curve(path: Path | None, key: str = "verify_curve") -> VerificationCurve:
    """Read a verification curve; None = a pass costs the same whatever its tokens. Raises ConfigError.

    The file has an object of costs by number of tokens, or one of two lists `tokens` and `cost`, or either of them
    under the key. Costs may be in any unit.
    """
    from speculant.lab.theory import FLAT, VerificationCurve

    if path is None:
        return FLAT
    content = read_object(path)
    tokens, costs = _points(path, content.get(key, content))
    try:
        return VerificationCurve(tuple(tokens), tuple(costs))
    except ValueError as error:
        problem, _, fix = str(error).partition("; ")
        raise _error(path, f"can't be used: {problem}", f"{fix}.") from error


def read_pair(path: Path | None) -> tuple[list[float], float] | tuple[None, None]:
    """Return acceptance rates by depth and the cost ratio from a report of `check-pair`; None for another file.

    Raises ConfigError for a file that can't be read.
    """
    content = {} if path is None else read_object(path)
    try:
        best = content["precisions"][content["best"]["precision"]]
        rates = best["rates"] or [best["alpha"]["mean"]]
        return [float(rate) for rate in rates], float(best["cost_ratio"])
    except (KeyError, TypeError, ValueError):
        return None, None


def _error(path: Path, problem: str, fix: str = FORMS) -> ConfigError:
    return ConfigError(f"the verification curve {path} {problem}", fix)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(path, f"can't be read: {error}", "check the path.") from error
    except (ValueError, RecursionError) as error:
        raise _error(path, f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _error(path, "does not hold a JSON object")
    return content


def _points(path: Path, points: Any) -> tuple[list[int], list[float]]:
    """Return numbers of tokens and their costs; the keys of an object are sorted."""
    if not isinstance(points, dict):
        raise _error(path, "has a curve that is not a JSON object")
    if not {"tokens", "cost"} & points.keys():
        pairs = sorted(((_read_key(path, key), cost) for key, cost in points.items()), key=lambda pair: pair[0])
        points = {"tokens": [count for count, _ in pairs], "cost": [cost for _, cost in pairs]}
    tokens, costs = points.get("tokens"), points.get("cost")
    if set(points) != {"tokens", "cost"} or not isinstance(tokens, list) or not isinstance(costs, list):
        raise _error(path, "does not have two lists, tokens and cost, and nothing else")
    for count in tokens:
        if not _is_number(count) or count != int(count):
            raise _error(path, f"has {count!r}, which is not a number of tokens")
    for cost in costs:
        if not _is_number(cost):
            raise _error(path, f"has {cost!r}, which is not a cost")
    return [int(count) for count in tokens], [float(cost) for cost in costs]


def _read_key(path: Path, key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise _error(path, f"has the key {key!r}, which is not a number of tokens") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


_FLEET_EXAMPLES = examples(
    "speculant check-pair demo demo --json > pair.json",
    "speculant plan fleet --costs pair.json --rate 20 --replicas 1,2,4",
    "speculant plan fleet --step-ms 20 --prompt-rate 8000 --alpha 0.8 --cost-ratio 0.05 --rate 8 --replicas 2,4",
    "speculant plan fleet --costs pair.json --rate 40 --replicas 4 --routing random,least,two --prefixes 100 "
    "--prefix-tokens 512 --prompt-tokens 600",
    "speculant plan fleet --costs pair.json --trace trace.jsonl --replicas 2 --autoscale 2:8 --failure-s 3600 --json",
)
LATENCY = {  # headings, and the figures below them with their units
    "first p50": ("first_token_p50_s", "{:.3f} s"),
    "p99": ("first_token_p99_s", "{:.3f} s"),
    "answer p50": ("answer_p50_s", "{:.2f} s"),
    "p99 ": ("answer_p99_s", "{:.2f} s"),
    "errors": ("errors", "{}"),
}
THROUGHPUT = {
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "per machine h": ("tokens_per_machine_hour", "{:,.0f}"),
    "busy": ("utilisation", "{:.0%}"),
    "hits": ("hit_rate", "{:.0%}"),
    "draft": ("mean_draft", "{:.1f}"),
    "retries": ("retries", "{}"),
}

Replicas = Annotated[str, typer.Option(help="Number of replicas, or several to compare: 1,2,4.")]
Routings = Annotated[str, typer.Option(help=f"How requests are routed, or several to compare: {','.join(Routing)}.")]
Autoscale = Annotated[str | None, typer.Option(help="Let an autoscaler choose the replicas, MIN:MAX.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Requests to replay instead of drawn ones, a JSON object per line: seconds, prompt_tokens, "
        "answer_tokens, and if it shares one, prefix (a name) and prefix_tokens."
    ),
]

BISECTIONS = 50  # of the rows of a pass


@dataclass(frozen=True)
class GivenCosts:
    """The costs of an engine as a user gives them: a file, and numbers that take precedence."""

    costs: Path | None = None
    step_ms: float | None = None
    prompt_rate: float | None = None
    alpha: str | None = None
    alpha_spread: float = 0.0
    cost_ratio: float | None = None
    draft_overhead: float | None = None
    overhead_ms: float = 0.0
    sequence_ms: float = 0.0
    admit_ms: float = 0.0
    request_ms: float = 0.0

    def engine_costs(self, limits: ReplicaLimits) -> tuple[EngineCosts, list[str]]:
        """Return the costs, and notes about guesses among them. Raises ConfigError."""
        from speculant.lab.fleet import EngineCosts

        content = {} if self.costs is None else read_object(self.costs)
        rates, ratio = read_pair(self.costs)
        overhead = 0.0 if rates is None else content["precisions"][content["best"]["precision"]].get("draft_overhead")
        curve, share, notes = self._curve(content, limits.max_num_batched_tokens)
        found = EngineCosts(
            curve,
            tuple(read_rates(self.alpha) if self.alpha is not None else rates or [0.0]),
            self.cost_ratio if self.cost_ratio is not None else ratio or 0.0,
            self.draft_overhead if self.draft_overhead is not None else overhead or 0.0,
            self.overhead_ms / 1e3,
            self.sequence_ms / 1e3,
            self.admit_ms / 1e3,
            self.request_ms / 1e3,
            self.alpha_spread,
            share,
        )
        return found, notes

    def _curve(self, content: Mapping[str, Any], rows: int) -> tuple[VerificationCurve, float, list[str]]:
        """Return the seconds of a pass by its tokens, and how many tokens one token of a prompt counts as.

        prompt_rate is measured with passes of `rows` tokens. Without a file, it gives the curve its second point.
        """
        from speculant.lab.theory import FLAT, VerificationCurve

        first_ms, rate = content.get("step_ms") if self.step_ms is None else self.step_ms, self.prompt_rate
        if not isinstance(first_ms, int | float) or not 0 < first_ms < float("inf"):
            raise ConfigError(
                "no time of a step was given" if first_ms is None else f"step_ms={first_ms} is not above 0",
                "add --costs pair.json, from `speculant check-pair TARGET DRAFT --json`, or --step-ms 20.",
            )
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"prompt_rate={rate} is not above 0", "use for example --prompt-rate 8000.")
        if self.costs is None and rate is not None:
            return VerificationCurve((1, max(2, rows)), (first_ms / 1e3, rows / rate)), 1.0, []
        key = "verification" if "verification" in content else "verify_curve"
        shape = FLAT if self.costs is None else read_curve(self.costs, key)
        seconds = tuple(first_ms / 1e3 * cost / shape.costs[0] for cost in shape.costs)
        curve = VerificationCurve(shape.tokens, seconds)
        if rate is not None:
            return curve, _rows_of(curve, rows / rate) / rows, []
        guess = f"passes of {curve.tokens[-1]} to {rows} tokens are extrapolated: add --prompt-rate"
        return curve, 1.0, [guess] if curve.tokens[-1] < rows else []


def _rows_of(curve: VerificationCurve, seconds: float) -> float:
    """Return the rows of a pass that takes this time. Raises ConfigError if there are none."""
    first_s, low, high = curve.costs[0], 0.0, 1e6
    if not first_s <= seconds <= first_s * curve.relative([high])[0]:
        raise ConfigError(
            f"no pass of the curve takes the {seconds:.3f} s of the prompt rate", "correct --prompt-rate."
        )
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if first_s * curve.relative([middle])[0] < seconds else (low, middle)
    return high


class CostFlags(FlagGroup):
    """The measured costs of an engine."""

    sets = GivenCosts

    costs: Annotated[Path, "A report of check-pair (JSON), or a curve as for `plan --verify-curve`."]
    step_ms: Annotated[float, "Milliseconds of a target pass over one token."]
    prompt_rate: Annotated[float, "Prompt tokens per second in passes of max_num_batched_tokens, as measured."]
    alpha: Annotated[str, "Acceptance rate, 0 to 1; or one per depth: 0.9,0.8,0.7."]
    alpha_spread: Annotated[float, "Standard deviation of the acceptance rate between requests."]
    cost_ratio: Annotated[float, "Time of a draft pass / a target pass of one row."]
    draft_overhead: Annotated[float, "Fixed time of a draft / a target pass of one row."]
    overhead_ms: Annotated[float, "Milliseconds of each step beside the passes."]
    sequence_ms: Annotated[float, "Milliseconds of a step for each sequence after the first."]
    admit_ms: Annotated[float, "Milliseconds of a step for each request that it admits, if the server shares its core."]
    request_ms: Annotated[float, "Milliseconds of each request where it delays no other, such as the network."]


class TrafficFlags(FlagGroup):
    """The requests."""

    sets = TrafficConfig

    rate: Annotated[float, "Requests per second."]
    requests: Annotated[int, "The number of requests."]
    prompt_tokens: Annotated[int, "Mean tokens of a prompt, with its shared prefix."]
    prompt_variation: Annotated[float, "Standard deviation / mean of the prompts' own tokens."]
    answer_tokens: Annotated[int, "Mean tokens of an answer."]
    answer_variation: Annotated[float, "Standard deviation / mean of the answers' tokens."]
    prefixes: Annotated[int, "The number of shared prefixes, such as system prompts; 0 = none."]
    prefix_tokens: Annotated[int, "Tokens of a shared prefix."]
    zipf: Annotated[float, "The k-th prefix is asked for in proportion to k to the power of minus this."]
    surge_at: Annotated[float, "From this second on, requests come at --surge-rate."]
    surge_rate: Annotated[float, "Requests per second after --surge-at."]


class FleetReplicaFlags(FlagGroup):
    """The engine of a replica."""

    sets = ReplicaLimits

    max_num_seqs: Annotated[int, "Sequences that run at a time."]
    max_num_batched_tokens: Annotated[int, "Rows of a pass."]
    kv_tokens: Annotated[int, "Positions of the KV cache."]
    block_size: Annotated[int, "Positions of a block."]
    draft_length: Annotated[str, "Tokens of a draft; auto = the best number at each load, 0 = no drafts."]


class FleetFlags(FlagGroup):
    """The fleet around the replicas."""

    sets = FleetConfig

    threshold: Annotated[float, "Requests by which loads may differ while prefixes decide the routing."]
    stale_s: Annotated[float, "Seconds between reports of loads to the router; 0 = it always knows them."]
    failure_s: Annotated[float, "Mean seconds until a replica fails."]
    lose: Annotated[int, "This many replicas fail together, at --lose-at."]
    lose_at: Annotated[float, "The second at which they fail."]
    start_s: Annotated[float, "Seconds until a new replica serves."]
    detect_s: Annotated[float, "Seconds until the router knows that a replica has failed."]
    retries: Annotated[int, "Retries of a request without a first token."]
    retry_s: Annotated[float, "Seconds before each retry."]
    timeout_s: Annotated[float, "Seconds without a first token after which a client retries."]
    seed: Annotated[int, "Fixes all that is random."]


class ScalingFlags(FlagGroup):
    """The autoscaler."""

    sets = Scaling

    target: Annotated[float, "With --autoscale: requests per replica that wait or run."]
    up_s: Annotated[float, "With --autoscale: seconds of need before replicas are added."]
    down_s: Annotated[float, "With --autoscale: seconds without need before replicas are given back."]


@app.command(epilog=_FLEET_EXAMPLES)
@accepts_log_level
@accepts_flags
def fleet(
    replicas: Replicas = "1",
    routing: Routings = Routing.TWO,
    autoscale: Autoscale = None,
    trace: Trace = None,
    as_json: AsJson = False,
    *,
    costs: CostFlags,
    traffic: TrafficFlags,
    limits: FleetReplicaFlags,
    settings: FleetFlags,
    scaling: ScalingFlags,
) -> None:
    """Simulate a fleet of replicas: latencies, throughput, tokens per machine hour.

    Each replica is an engine whose steps take the measured time. Give a report of `check-pair`, or --step-ms and what
    else you know. The output has a row for each number of replicas and each routing. Equal flags give equal figures.
    """
    from speculant.lab.fleet import arrivals, environment, read_trace

    environment()  # first: without simpy nothing else matters
    engine = ReplicaLimits(**limits.given)
    found, notes = GivenCosts(**costs.given).engine_costs(engine)
    config = FleetConfig(**settings.given, scaling=_scaling(autoscale, scaling))
    asked = [
        replace(config, replicas=count, routing=name) for count in _counts(replicas) for name in routing.split(",")
    ]
    drawn = TrafficConfig(**traffic.given)
    requests = arrivals(drawn, str(config.seed)) if trace is None else read_trace(trace)
    with progress_of_parts() as parts:
        rows = [_row(each, found, engine, requests, parts) for each in asked]
    value = {
        "settings": {
            "costs": asdict(found),
            "replica": asdict(engine),
            "traffic": asdict(drawn) if trace is None else {"trace": str(trace)},
            "fleet": {name: each for name, each in asdict(config).items() if name not in ("replicas", "routing")},
        },
        "fleets": rows,
        "notes": notes,
    }
    if as_json:
        print_json(value)
    else:
        _show_fleets(results(), value)


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--replicas {text!r} is not a number", "use --replicas 2, or several: 1,2,4.") from None


def _scaling(text: str | None, flags: ScalingFlags) -> Scaling | None:
    if text is None:
        if flags.given:
            raise ConfigError(
                f"--{next(iter(flags.given)).replace('_', '-')} has no autoscaler", "add --autoscale 2:8."
            )
        return None
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal()):
        raise ConfigError(f"--autoscale {text!r} is not MIN:MAX", "use --autoscale 2:8.")
    return Scaling(int(least), int(most), **flags.given)


def _row(
    config: FleetConfig, costs: EngineCosts, limits: ReplicaLimits, requests: Sequence[Arrival], parts: Parts
) -> dict[str, Any]:
    """Simulate a fleet, and return its figures."""
    from speculant.lab.fleet import figures, simulate_fleet

    name = f"Simulating {config.replicas} replicas, {config.routing}"
    parts.begin(name)
    run = simulate_fleet(config, costs, limits, requests, lambda done: parts.begin(f"{name}: {done:.0%}"))
    return {"replicas": config.replicas, "routing": config.routing, **figures(run, costs.request_s)}


def _show_fleets(console: Console, value: Mapping[str, Any]) -> None:
    for columns in (LATENCY, THROUGHPUT):
        table = Table(box=None, pad_edge=False)
        for heading in ("replicas", "routing", *columns):
            table.add_column(heading, justify="left" if heading == "routing" else "right", no_wrap=True)
        for row in value["fleets"]:
            cells = ["-" if row[key] is None else form.format(row[key]) for key, form in columns.values()]
            table.add_row(str(row["replicas"]), row["routing"], *cells)
        console.print(table)
    for note in value["notes"]:
        console.print(f"note: {note}", style="yellow")
