"""The buckets of distances (T5, arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speculant.models.description import DistanceBias


def buckets_of(of: DistanceBias, distances: Tensor) -> Tensor:
    """Return the bucket int64 of each distance int64 from a row back to a key; a key after the row has a negative one.

    The logarithm is in float32, as in transformers: at the edge of a bucket its last bit decides.
    """
    count, first = of.buckets, torch.zeros_like(distances)
    if of.both_ways:
        count //= 2
        first, distances = (distances < 0) * count, distances.abs()
    distances, single = distances.clamp(min=0), count // 2
    wide = torch.log(distances.clamp(min=1).float() / single) / math.log(of.max_distance / single) * (count - single)
    return first + torch.where(distances < single, distances, (single + wide.long()).clamp(max=count - 1))
