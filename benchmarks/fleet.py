"""Compares `speculant plan fleet` with running engines, and simulates large fleets.

fakes: engines whose steps sleep, at 1, 2 and 4 replicas; a sleep ends late, and the mean of that is a cost of a step.
servers: `speculant serve` at 1 and 2 replicas, a core each, with costs that are measured between the requests. large:
a fleet of many replicas, simulated alone. --requests is for fakes, and --rounds for servers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculant.lab.bench import Benchmark, markdown
from speculant.lab.fleet import Arrival, ReplicaLimits, TrafficConfig, arrivals

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/fleet.py` finds the parts too

from benchmarks.fleets.compared import LOADS, NAMES, capacity, compared, costs_of, measured, simulated
from benchmarks.fleets.fakes import Asked, Machine, run_fakes
from benchmarks.fleets.large import LARGE, measure_large, show_large
from benchmarks.fleets.servers import SERVERS, measure_servers

POINTS = ((1, 0.03), (8, 0.033), (64, 0.06), (512, 0.24))
ALPHA, RATIO = 0.7, 0.05
LIMITS = ReplicaLimits(max_num_seqs=8, max_num_batched_tokens=512)
PARTS = ("fakes", "servers", "large")


def measure_fakes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every number of replicas at every load; the loads of a number run at the same time."""
    costs = costs_of(POINTS, rates=(ALPHA,), cost_ratio=RATIO)
    machine = Machine(POINTS, RATIO, ALPHA, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)
    rows, number = list[dict[str, Any]](), 40 if arguments.quick else arguments.requests
    shape = {"prompt_tokens": 200, "prompt_variation": 0.5, "answer_tokens": 40, "answer_variation": 0.5}
    full = capacity(costs, LIMITS, shape)
    for replicas in (1, 2, 4):
        traffics = [
            arrivals(
                TrafficConfig(load * full * replicas, number * replicas // (1 + replicas // 4), **shape),
                f"fakes {replicas} {load}",
            )
            for load in LOADS
        ]
        answers = asyncio.run(_all_loads(machine, replicas, traffics))
        for load, traffic, (asked, late) in zip(LOADS, traffics, answers, strict=True):
            seen = measured([each.first - each.due for each in asked], [each.ended - each.due for each in asked])
            said = simulated(replicas, "least", replace(costs, step_s=late), LIMITS, traffic)
            rows.append(
                {
                    "replicas": replicas,
                    "load": load,
                    "requests": len(asked),
                    "late_s": late,
                    "measured": seen,
                    "simulated": said,
                    "difference": compared(seen, said),
                }
            )
            yield {"part": "fakes", "capacity": full, "rows": rows}


async def _all_loads(
    machine: Machine, replicas: int, traffics: Sequence[Sequence[Arrival]]
) -> list[tuple[list[Asked], float]]:
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
    measure=measure, show=show, rounds=3,
    options={"part": {"choices": PARTS, "default": "fakes"}, "requests": 800, "model": "demo", "draft_model": "demo"},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
