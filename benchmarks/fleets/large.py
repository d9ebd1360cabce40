"""A large fleet, simulated alone: what changes from 100 to 10,000 replicas at the same load per replica.

Each replica gets the same requests per second, and there are two shared prefixes per replica, whose popularity is that
of Zipf's law. Latencies and hits are those of the later half of the requests, as caches
are empty at first; or of those after the failures or the surge.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from speculant.lab.bench import markdown
from speculant.lab.fleet import (
    EngineCosts,
    FleetConfig,
    FleetRun,
    ReplicaLimits,
    Scaling,
    TrafficConfig,
    arrivals,
    figures,
    simulate_fleet,
)
from speculant.lab.theory import VerificationCurve

LARGE = (
    "two choices come within 20% of the least loaded of all in the p99 of the first token. Loads that are a second old "
    "make the least loaded far worse than random, and two choices only a little worse. Pure affinity overloads the "
    "replica of the hottest prefix at every size, and more at 10,000. A threshold on the whole fleet's imbalance turns "
    "affinity off at 10,000, as some replica always exceeds it; a threshold on the chosen replica keeps it. When a "
    "twentieth of the replicas fails unnoticed, the least loaded sends nearly everything there. Retries after a "
    "timeout keep a fleet overloaded after its replicas are back. An autoscaler helps a minute and more after a surge."
)
COSTS = EngineCosts(VerificationCurve((1, 16, 64, 256, 2048), (0.02, 0.021, 0.024, 0.036, 0.15)), (0.7,), 0.05)
LIMITS = ReplicaLimits(max_num_seqs=16, max_num_batched_tokens=2048, kv_tokens=65536)
RATE, PER_REPLICA = 6.0, 12  # requests per second, and in all, of each replica
TRAFFIC = TrafficConfig(
    prompt_tokens=1200, prompt_variation=0.5, answer_tokens=50, answer_variation=0.5, prefixes=2, prefix_tokens=1000
)


@dataclass(frozen=True)
class Study:
    """One simulation: the fleet, and how its requests differ from the usual ones."""

    name: str
    sizes: tuple[int, ...]
    fleet: Mapping[str, Any]
    traffic: Mapping[str, Any] = field(default_factory=dict)
    per_replica: float = PER_REPLICA


ALL = (100, 1000, 10_000)
LOST = {"start_s": 60.0, "retries": 3, "lose_at": 1.0}
STUDIES = (
    Study("random", ALL[:2], {"routing": "random"}),
    Study("two choices", ALL, {"routing": "two"}),
    Study("least of all", ALL, {"routing": "least"}),
    Study("least of all, loads 1 s old", ALL, {"routing": "least", "stale_s": 1.0}),
    Study("two choices, loads 1 s old", ALL, {"routing": "two", "stale_s": 1.0}),
    Study("prefix, no threshold", ALL, {"routing": "prefix", "threshold": 1e9}),
    Study("prefix, threshold 8 for the fleet", ALL, {"routing": "prefix", "threshold": 8}),
    Study("prefix, threshold 8 for the replica", ALL, {"routing": "prefix-bounded", "threshold": 8}),
    Study("prefix, threshold 2 for the replica", ALL, {"routing": "prefix-bounded", "threshold": 2}),
    Study("a twentieth fails, noticed at once, two", (100, 1000), {"routing": "two", **LOST}),
    Study("a twentieth fails, noticed after 1 s, two", (100, 10_000), {"routing": "two", "detect_s": 1.0, **LOST}),
    Study("a twentieth fails, noticed after 1 s, least", (100, 10_000), {"routing": "least", "detect_s": 1.0, **LOST}),
    Study("the same, retries after 0.5 s", (100, 1000), {"routing": "least", "detect_s": 1.0, "retry_s": 0.5, **LOST}),
    *(
        Study(
            f"timeouts of 1 s, {name}, 30% fail for 10 s",
            (100,),
            {"routing": "two", "lose_at": 5.0, "lose_share": 0.3, "start_s": 10.0, "timeout_s": 1.0, **more},
            {"rate": 11.0},
            400,
        )
        for name, more in (
            ("no retries", {"retries": 0}),
            ("3 retries", {"retries": 3}),
            ("3 retries after 5 s each", {"retries": 3, "retry_s": 5.0}),
        )
    ),
    *(
        Study(
            f"surge to three times, {name}",
            (30,),
            {"routing": "two", "start_s": 60.0, **more},
            {"rate": 6.0, "surge_at": 60.0, "surge_rate": 18.0},
            2500,
        )
        for name, more in (
            ("no autoscaler", {}),
            ("added after 30 s", {"scaling": Scaling(30, 120, 8.0, 1.0, 30.0, 600.0)}),
            ("added after 5 s", {"scaling": Scaling(30, 120, 8.0, 1.0, 5.0, 600.0)}),
            ("added after 5 s, twice as many", {"scaling": Scaling(30, 120, 4.0, 1.0, 5.0, 600.0)}),
        )
    ),
)


def simulated_study(study: Study, size: int) -> dict[str, Any]:
    """Run a study with a number of replicas; return its figures."""
    fleet, changes = dict(study.fleet), dict(study.traffic)
    share = fleet.pop("lose_share", 0.05)
    if "lose_at" in fleet:
        fleet["lose"] = round(share * size)
    for name in ("rate", "surge_rate"):
        if name in changes or name == "rate":
            changes[name] = changes.get(name, RATE) * size
    requests = round(study.per_replica * size)
    traffic = arrivals(replace(TRAFFIC, requests=requests, prefixes=2 * size, **changes), "large")
    started = time.perf_counter()
    run = simulate_fleet(FleetConfig(size, **fleet), COSTS, LIMITS, traffic)
    wall_s = time.perf_counter() - started
    event = changes.get("surge_at", fleet.get("lose_at", traffic[requests // 2].seconds))
    later = figures(replace(run, requests=[each for each in run.requests if each.arrival.seconds >= event]))
    return {**figures(run), **{name: later[name] for name in LATER}, "simulated_in_s": wall_s, "hot_share": _hot(run)}


LATER = (
    *("first_token_mean_s", "first_token_p50_s", "first_token_p99_s", "answer_p50_s", "answer_p99_s"),
    *("hit_rate", "mean_draft"),
)


def _hot(run: FleetRun) -> float:
    """Return the share of the requests that have the most popular prefix."""
    return sum(each.arrival.prefix == 0 for each in run.requests) / len(run.requests)


def measure_large(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every study at each of its sizes, the small ones first."""
    rows = list[dict[str, Any]]()
    chosen = [(size, study) for study in STUDIES for size in study.sizes if not arguments.quick or size == 100]
    for size, study in sorted(chosen, key=lambda each: each[0]):
        rows.append({"study": study.name, "replicas": size, **simulated_study(study, size)})
        yield {"part": "large", "rate_per_replica": RATE, "rows": rows}


def show_large(seen: Mapping[str, Any]) -> str:
    """Return a table of the studies."""
    table = [
        [
            row["study"],
            f"{row['replicas']:,}",
            *(f"{row[name]:.2f} s" for name in ("first_token_p50_s", "first_token_p99_s", "answer_p99_s")),
            f"{row['hit_rate']:.0%}",
            f"{row['retries'] / row['requests']:.1%}",
            f"{row['errors'] / row['requests']:.1%}",
            f"{row['router_entries']:,}",
            f"{row['router_updates_per_s']:,.0f}",
            f"{row['tokens_per_machine_hour'] / 1e3:,.0f}k",
        ]
        for row in seen["rows"]
    ]
    headings = ["study", "replicas", "first p50", "first p99", "answer p99", "hits", "retries", "errors"]
    return markdown([*headings, "entries", "changes/s", "tokens/machine h"], table)
