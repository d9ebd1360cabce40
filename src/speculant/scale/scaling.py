"""Chooses the number of replicas by their load, for Ray Serve's autoscaler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

FULL = 0.75  # share of places, or of cache memory, that a replica should have in use


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the load needs, before bounds and delays, which Ray Serve applies."""
    metrics = context.aggregated_metrics or {}
    return needed([metrics.get("places", {}), metrics.get("tokens", {})], context.current_num_replicas), {}


def needed(shares: list[Mapping[Any, float]], current: int) -> int:
    """Return the replicas that bring the larger of these loads to `FULL`.

    shares: by replica, the share of its places in use or waited for, and the share of its memory in use. Without any
    figure the number stays.
    """
    sums = [sum(by_replica.values()) for by_replica in shares if by_replica]
    if not sums:
        return current
    return max(1, math.ceil(max(sums) / FULL - 1e-9))
