"""`speculant plan fleet` against engines that really take their time, and what it says about large fleets.

fakes: engines whose steps sleep, at 1, 2 and 4 replicas. servers: `speculant serve` at 1 and 2 replicas, a core each,
with costs that are measured in the same run. large: a fleet of many replicas, simulated alone.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from fleet_fakes import Asked, Machine, run_fakes
from fleet_large import LARGE, measure_large, show_large
from fleet_servers import SERVERS, measure_servers

from speculant.lab.bench.runner import Benchmark, markdown
from speculant.lab.fleet.config import FleetConfig, ReplicaLimits, TrafficConfig
from speculant.lab.fleet.costs import EngineCosts
from speculant.lab.fleet.fleet import simulate_fleet
from speculant.lab.fleet.report import figures
from speculant.lab.fleet.traffic import Arrival, arrivals
from speculant.lab.theory.curve import VerificationCurve

LOADS = (0.3, 0.6, 0.85)  # of the capacity
SEEDS = 5  # of the simulator
POINTS = ((1, 0.03), (8, 0.033), (64, 0.06), (512, 0.24))
ALPHA, RATIO = 0.7, 0.05
LIMITS = ReplicaLimits(max_num_seqs=8, max_num_batched_tokens=512)
NAMES = ("first_token_p50_s", "first_token_p99_s", "answer_p50_s", "answer_p99_s")
PARTS = ("fakes", "servers", "large")


def costs_of(points: Sequence[tuple[int, float]], **others: Any) -> EngineCosts:
    """Return the costs with passes of these rows and seconds."""
    rows, seconds = zip(*points, strict=True)
    return EngineCosts(VerificationCurve(rows, seconds), **others)


def simulated(
    replicas: int, routing: str, costs: EngineCosts, limits: ReplicaLimits, traffic: Sequence[Arrival]
) -> dict[str, Any]:
    """Return the mean of each figure over the seeds, with its least and most."""
    found = [
        figures(simulate_fleet(FleetConfig(replicas, routing, seed=seed), costs, limits, traffic), costs.request_s)
        for seed in range(SEEDS)
    ]
    return {
        name: {"mean": float(np.mean(each)), "low": min(each), "high": max(each)}
        for name in (*NAMES, "utilisation", "mean_draft")
        if (each := [one[name] for one in found])
    }


def measured(first: Sequence[float], whole: Sequence[float]) -> dict[str, float]:
    """Return the quantiles of times in seconds."""
    return dict(zip(NAMES, (*np.percentile(first, (50, 99)), *np.percentile(whole, (50, 99))), strict=True))


def compared(seen: Mapping[str, float], said: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much the simulator's figures differ, as a share of the measured ones."""
    return {name: said[name]["mean"] / seen[name] - 1 for name in NAMES}


def capacity(costs: EngineCosts, limits: ReplicaLimits, config: TrafficConfig) -> float:
    """Return the requests per second of one replica that is never idle, by the simulator; it only sets the loads."""
    traffic = [Arrival(0.0, each.prompt, each.answer) for each in arrivals(config, "capacity")]
    return len(traffic) / simulate_fleet(FleetConfig(), costs, limits, traffic).seconds


def measure_fakes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every number of replicas at every load; the loads of a number run at the same time."""
    costs = costs_of(POINTS, rates=(ALPHA,), cost_ratio=RATIO)
    machine = Machine(POINTS, RATIO, ALPHA, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)
    rows, number = list[dict[str, Any]](), 40 if arguments.quick else arguments.requests
    shape = {"prompt_tokens": 200, "prompt_variation": 0.5, "answer_tokens": 40, "answer_variation": 0.5}
    full = capacity(costs, LIMITS, TrafficConfig(requests=300, **shape))
    for replicas in (1, 2, 4):
        traffics = [
            arrivals(
                TrafficConfig(load * full * replicas, number * replicas // (1 + replicas // 4), **shape),
                f"fakes {replicas} {load}",
            )
            for load in LOADS
        ]
        answers = asyncio.run(_all_loads(machine, replicas, traffics))
        for load, traffic, asked in zip(LOADS, traffics, answers, strict=True):
            seen = measured([each.first - each.due for each in asked], [each.ended - each.due for each in asked])
            said = simulated(replicas, "least", costs, LIMITS, traffic)
            rows.append(
                {
                    "replicas": replicas,
                    "load": load,
                    "requests": len(asked),
                    "measured": seen,
                    "simulated": said,
                    "difference": compared(seen, said),
                }
            )
            yield {"part": "fakes", "capacity": full, "rows": rows}


async def _all_loads(machine: Machine, replicas: int, traffics: Sequence[Sequence[Arrival]]) -> list[list[Asked]]:
    running = [
        run_fakes(
            machine,
            replicas,
            [Asked(each.prompt, each.answer, each.prefix, each.shared) for each in traffic],
            [each.seconds for each in traffic],
            "least",
            f"{replicas} {number}",
        )
        for number, traffic in enumerate(traffics)
    ]
    return await asyncio.gather(*running)


def show(seen: Mapping[str, Any]) -> str:
    """Return a table: measured times, and by how much the simulated ones differ."""
    if seen["part"] == "large":
        return show_large(seen)
    table = [
        [
            str(row["replicas"]),
            *([row["drafts"]] if "drafts" in row else []),
            f"{row['load']:.0%}",
            *(f"{row['measured'][name]:.3f} s ({row['difference'][name]:+.0%})" for name in NAMES),
        ]
        for row in seen["rows"]
    ]
    drafts = ["drafts"] if "drafts" in seen["rows"][0] else []
    return markdown(["replicas", *drafts, "load", "first p50", "first p99", "answer p50", "answer p99"], table)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one part."""
    arguments.name = f"fleet_{arguments.part}"
    parts = {"fakes": measure_fakes, "servers": measure_servers, "large": measure_large}
    yield from parts[arguments.part](arguments)


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="fakes: p50 within 5% and p99 within 15% at every load; the largest difference is the p99 of the first "
    f"token at 85%, because acceptance is drawn anew. servers: {SERVERS} large: {LARGE}",
    measure=measure, show=show,
    options={"part": {"choices": PARTS, "default": "fakes"}, "requests": 800, "model": "demo", "draft_model": "demo"},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
