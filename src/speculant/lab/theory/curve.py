"""The measured cost of a target pass by its number of rows: V(m), with V(1) = 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class VerificationCurve:
    """Times of passes over `tokens` rows, in any unit: `costs[i]` belongs to `tokens[i]`, in ascending order from 1.

    Between them the cost is linear. Beyond the last it continues with the last slope, or stays constant if that is
    negative. Raises ValueError for anything else.
    """

    tokens: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.costs):
            raise ValueError(f"{len(self.tokens)} numbers of tokens have {len(self.costs)} costs; give one cost each")
        if len(self.tokens) < 2 or self.tokens[0] != 1 or any(np.diff(self.tokens) <= 0):
            raise ValueError(
                f"the numbers of tokens are {list(self.tokens)}; give two or more, in ascending order from 1"
            )
        if not all(np.isfinite(cost) and cost > 0 for cost in self.costs):
            raise ValueError(f"the costs are {list(self.costs)}; give numbers above 0")

    def relative(self, tokens: ArrayLike, batch: int = 1) -> Array:
        """Return the cost of passes with batch x tokens rows over that with `batch` rows: V(b m) / V(b)."""
        costs: Array = self._at(np.asarray(tokens, dtype=np.float64) * batch) / self._at(np.full(1, float(batch)))[0]
        return costs

    def _at(self, rows: Array) -> Array:
        slope = (self.costs[-1] - self.costs[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(rows - self.tokens[-1], 0.0)
        within: Array = np.asarray(np.interp(rows, self.tokens, self.costs))
        return within + max(slope, 0.0) * beyond


FLAT = VerificationCurve((1, 2), (1.0, 1.0))  # more rows cost nothing (arXiv 2211.17192, section 3.3)
