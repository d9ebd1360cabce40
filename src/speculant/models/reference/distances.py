"""The buckets of distances; see `DistanceBias`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speculant.models.description import DistanceBias


def buckets_of(of: DistanceBias, distances: Tensor) -> Tensor:
    """Return the buckets of distances, both int64 [...]. A distance is the position of a key minus that of a row."""
    buckets = of.buckets // 2 if of.both_ways else of.buckets
    first = buckets * (distances > 0) if of.both_ways else torch.zeros_like(distances)
    away = distances.abs() if of.both_ways else -distances.clamp(max=0)
    single = buckets // 2  # buckets of one distance each
    ratios = torch.log(away.float() / single) / math.log(of.max_distance / single)
    wide = single + (ratios.clamp(min=0) * (buckets - single)).long()
    return first + torch.where(away < single, away, wide.clamp(max=buckets - 1))
