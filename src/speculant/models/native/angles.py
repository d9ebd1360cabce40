"""Tables of rotary positions for the native kernels: one of cosines and one of sines for each kind, by position.

If texts beyond a length have other angles, these follow in the same tables:

    row        0 ... n - 1               n ... 2 n - 1
    angles     of positions 0 ... n - 1  of the same positions in long texts
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from speculant.kernels import Pass, address
from speculant.models.description import DecoderConfig
from speculant.models.reference.decoder import rotaries
from speculant.models.reference.rotary import Rotary

FEWEST_POSITIONS = 256  # in the tables at first


class AngleTables:
    """The tables of a description's `rotations`, in their order. They grow with the positions that are used.

    tensors: cosines and sines [rows, rotated / 2], and factors of queries [rows] where there are some. widths: of the
    rows of each table.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._rotaries, self._restarts = [*rotaries(config).values()], config.restart_at is not None
        self.widths = array("q", [rotary.pairs for rotary in self._rotaries])
        self.tensors: list[Tensor] = []
        self._positions = 0
        self._cosines, self._sines, self._factors = array("Q"), array("Q"), array("Q")

    def point(self, on: Pass, end: int) -> None:
        """Let a pass point to tables that have the positions below `end`."""
        if end > self._positions and self._rotaries:
            self._grow(next_power(end))
        on.cosines, on.sines = address(self._cosines), address(self._sines)
        on.query_factors = address(self._factors) if any(self._factors) else None

    def rows(self, positions: Tensor, long: Tensor | None) -> Tensor | None:
        """Return the rows of the tables [T] for rows of a pass, after `point`; None = their positions.

        long: see `Batch.long_rows`.
        """
        return positions + self._positions * long if long is not None and bool(long.any()) else None

    def _grow(self, positions: int) -> None:
        at, long = torch.arange(positions), None
        if self._restarts:
            at, long = at.repeat(2), torch.arange(2 * positions) >= positions
        both = [_halves(rotary, at, long) for rotary in self._rotaries]
        factors = [rotary.query_factors(at) for rotary in self._rotaries]
        self.tensors = [table for of_one in both for table in of_one] + [each for each in factors if each is not None]
        self._cosines, self._sines = (array("Q", [of_one[i].data_ptr() for of_one in both]) for i in (0, 1))
        self._factors = array("Q", [0 if each is None else each.data_ptr() for each in factors])
        self._positions = positions


def _halves(rotary: Rotary, at: Tensor, long: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [rows, rotated / 2]; the other halves are equal to them."""
    cosines, sines = (table[:, 0].chunk(2, dim=1)[0].contiguous() for table in rotary.angles(at, torch.float32, long))
    return cosines, sines


def next_power(positions: int) -> int:
    """Return to how many positions the tables grow to have at least this number."""
    return max(FEWEST_POSITIONS, 1 << (positions - 1).bit_length())
