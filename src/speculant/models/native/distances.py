"""Tables of distances in native programs: the number that is added to a score, by head and distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from speculant.models.description import DistanceBias
from speculant.models.distances import buckets_of
from speculant.models.sizes import DISTANCES
from speculant.models.weights.reader import WeightReader


class DistanceTable(NamedTuple):
    """The numbers of the distances from -before to after, whose ends stand for all distances beyond.

    A distance is the position of a key minus that of a row.
    """

    numbers: Tensor  # float32 [heads, before + 1 + after]
    before: int
    after: int

    @classmethod
    def read(cls, of: DistanceBias | None, attention: WeightReader) -> DistanceTable | None:
        """Read a layer's table; None = it has none, or shares another layer's."""
        if of is None or of.shares is not None:
            return None
        before, after = of.max_distance, of.max_distance if of.both_ways else 0
        buckets = buckets_of(of, torch.arange(before, -after - 1, -1))
        by_bucket = attention.vector(DISTANCES)  # [buckets, heads]
        return cls(by_bucket[buckets].T.contiguous(), before, after)
