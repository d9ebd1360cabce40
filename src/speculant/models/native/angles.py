"""Tables of rotary positions for the native kernels: one of cosines and one of sines for each kind, by position."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from speculant.kernels.native import Pass, address
from speculant.models.description import DecoderConfig
from speculant.models.reference.decoder import rotaries
from speculant.models.reference.rotary import Rotary

FEWEST_POSITIONS = 256  # in the tables at first


class AngleTables:
    """The tables of a description's `ropes`, in their order. They grow with the positions that are used.

    tensors: cosines and sines [positions, rotated / 2], and factors of queries [positions] where there are some.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._rotaries = [*rotaries(config).values()]
        self.tensors: list[Tensor] = []
        self._positions = 0
        self._cosines, self._sines, self._factors = array("Q"), array("Q"), array("Q")

    def point(self, on: Pass, end: int) -> None:
        """Let a pass point to tables that have the positions below `end`."""
        if end > self._positions and self._rotaries:
            self._grow(next_power(end))
        on.cosines, on.sines = address(self._cosines), address(self._sines)
        on.query_factors = address(self._factors) if any(self._factors) else None

    def _grow(self, positions: int) -> None:
        at = torch.arange(positions)
        both = [_halves(rotary, at) for rotary in self._rotaries]
        factors = [rotary.query_factors(at) for rotary in self._rotaries]
        self.tensors = [table for of_one in both for table in of_one] + [each for each in factors if each is not None]
        self._cosines, self._sines = (array("Q", [of_one[i].data_ptr() for of_one in both]) for i in (0, 1))
        self._factors = array("Q", [0 if each is None else each.data_ptr() for each in factors])
        self._positions = positions


def _halves(rotary: Rotary, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, rotated / 2]; the other halves are equal to them."""
    cosines, sines = (table[:, 0].chunk(2, dim=1)[0].contiguous() for table in rotary.angles(at, torch.float32))
    return cosines, sines


def next_power(positions: int) -> int:
    """Return how many positions the tables have when they first have these."""
    return max(FEWEST_POSITIONS, 1 << (positions - 1).bit_length())
