"""The simulator's figures beside measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speculant.lab.fleet import (
    Arrival,
    EngineCosts,
    FleetConfig,
    ReplicaLimits,
    TrafficConfig,
    arrivals,
    figures,
    simulate_fleet,
)
from speculant.lab.theory import VerificationCurve

LOADS = (0.3, 0.6, 0.85)  # of the capacity
SEEDS = 5  # of the simulator
NAMES = ("first_token_p50_s", "first_token_p99_s", "answer_p50_s", "answer_p99_s")


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


def capacity(costs: EngineCosts, limits: ReplicaLimits, shape: Mapping[str, Any]) -> float:
    """Return the requests per second of one replica that is never idle, by the simulator; it only sets the loads."""
    drawn = arrivals(TrafficConfig(requests=300, **shape), "capacity")
    traffic = [Arrival(0.0, each.prompt, each.answer) for each in drawn]
    return len(traffic) / simulate_fleet(FleetConfig(), costs, limits, traffic).seconds
