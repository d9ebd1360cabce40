"""`speculant plan fleet`: how many replicas a load needs, how to route it, and what failures and scaling do to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli.flags import FlagGroup, accepts_flags
from speculant.cli.terminal import Parts, examples, print_json, progress_of_parts, results
from speculant.errors import ConfigError
from speculant.lab.cli.measured_costs import read_curve, read_object, read_pair, read_rates
from speculant.lab.fleet.config import FleetConfig, ReplicaLimits, Routing, Scaling, TrafficConfig

if TYPE_CHECKING:
    from speculant.lab.fleet.replica import EngineCosts
    from speculant.lab.fleet.traffic import Arrival
    from speculant.lab.theory.speedup import VerificationCurve

EXAMPLES = examples(
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
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]

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
        from speculant.lab.fleet.replica import EngineCosts

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
        """Return the seconds of a pass by its tokens, and how many of them a prompt's token counts as.

        prompt_rate is that of passes of `rows` tokens. Without a file, it gives the curve its second point.
        """
        from speculant.lab.theory.speedup import FLAT, VerificationCurve

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
    from speculant.lab.fleet.fleet import environment
    from speculant.lab.fleet.traffic import arrivals, read_trace

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
        _show(results(), value)


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
    from speculant.lab.fleet.fleet import figures, simulate_fleet

    name = f"Simulating {config.replicas} replicas, {config.routing}"
    parts.begin(name)
    run = simulate_fleet(config, costs, limits, requests, lambda done: parts.begin(f"{name}: {done:.0%}"))
    return {"replicas": config.replicas, "routing": config.routing, **figures(run, costs.request_s)}


def _show(console: Console, value: Mapping[str, Any]) -> None:
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
