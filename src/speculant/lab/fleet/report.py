"""The figures of a simulated fleet."""

from __future__ import annotations

from typing import Any

import numpy as np

from speculant.lab.fleet.fleet import FleetRun

HOUR = 3600.0
QUANTILES = (50, 99)


def figures(run: FleetRun, request_s: float = 0.0) -> dict[str, Any]:
    """Return the figures by name; None = undefined. Times are in seconds, those of answered requests.

    request_s: of each request outside of the engine. machine hours include the start of replicas. hit_rate: the share
    of prompt tokens that were found in a cache. mean_draft: drafted tokens per sequence and step.
    """
    answered = [each for each in run.requests if each.error is None and each.end_s is not None]
    tokens = sum(each.arrival.answer for each in answered)
    prompts, steps = sum(each.arrival.prompt for each in answered), sum(each.steps for each in answered)
    hours = run.machine_s / HOUR
    first = [each.first_s - each.arrival.seconds + request_s for each in answered if each.first_s is not None]
    whole = [each.end_s - each.arrival.seconds + request_s for each in answered if each.end_s is not None]
    return {
        "requests": len(run.requests),
        "errors": sum(each.error is not None for each in run.requests),
        "retries": sum(max(0, each.tries - 1) for each in run.requests),
        "refused": run.refused,
        "timeouts": run.timeouts,
        "failures": run.failures,
        "seconds": run.seconds,
        **_quantiles("first_token", first),
        **_quantiles("answer", whole),
        "tokens_per_s": tokens / run.seconds if run.seconds else None,
        "tokens_per_machine_hour": tokens / hours if hours else None,
        "machine_hours": hours,
        "utilisation": run.busy_s / run.machine_s if run.machine_s else None,
        "hit_rate": sum(each.reused for each in answered) / prompts if prompts else None,
        "mean_draft": sum(each.drafted for each in answered) / steps if steps else 0.0,
        "most_replicas": run.most_replicas,
        "router_entries": run.most_entries,
        "router_updates_per_s": run.updates / run.seconds if run.seconds else None,
    }


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    found = np.percentile(values, QUANTILES).tolist() if values else [None] * len(QUANTILES)
    mean = float(np.mean(values)) if values else None
    return {f"{name}_mean_s": mean, **{f"{name}_p{q}_s": each for q, each in zip(QUANTILES, found, strict=True)}}
