"""`speculant plan`: which draft length pays, from an acceptance rate and the costs of draft and verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculant.cli import accepts_log_level, command_group, examples, print_json, results
from speculant.errors import ConfigError
from speculant.lab.cli import plan_fleet
from speculant.lab.cli.measured_costs import read_curve, read_pair, read_rates
from speculant.params import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
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
app.command(epilog=plan_fleet.EXAMPLES)(accepts_log_level(plan_fleet.fleet))


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
        *(() if answers is None else [_answers(tokens, answers)]),
    ]


def _answers(tokens: int, answers: Mapping[str, float]) -> str:
    return (
        f"answers of {tokens} tokens: {answers['mean']:.2f} times, "
        f"95% of them {answers['low']:.2f} to {answers['high']:.2f}"
    )
