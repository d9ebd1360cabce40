"""Matrices of small integers in groups of columns, each with a scale and a zero point, and their rows as blocks.

    w[i, j] = scale[i, g] * (q[i, j] - zero[i, g])      where g is the group of column j

The blocks hold the same numbers. Groups of 64, 128 or all columns repeat their scale in each block of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculant.models.weights.layouts import GROUP
from speculant.models.weights.source import QuantizedBlocks

_SYMMETRIC = {4: "q4_0", 8: "q8_0"}  # layouts, by bits


@dataclass(frozen=True)
class InputGroups:
    """The groups of a matrix's k columns. of: that of each column, int64 [k]; each of `count` groups has a column."""

    of: np.ndarray
    count: int

    @classmethod
    def of_size(cls, k: int, size: int) -> InputGroups:
        """Return groups of neighbours. size: columns of a group; the last one may have fewer."""
        return cls(np.arange(k) // size, -(-k // size))

    @property
    def order(self) -> np.ndarray:
        """The columns, sorted by group."""
        return np.argsort(self.of, kind="stable")

    @property
    def is_sorted(self) -> bool:
        """Whether the groups are in order already."""
        return bool((np.diff(self.of) >= 0).all())

    def why_decoded(self) -> str:
        """Return why no blocks can have these groups; "" if they can."""
        if len(self.of) % GROUP:
            return f"rows of {len(self.of)} weights are no whole blocks of {GROUP}"
        sizes = np.bincount(self.of, minlength=self.count)
        if (sizes % GROUP).any():
            return f"groups of {int(sizes[sizes % GROUP != 0][0])} weights are no whole blocks of {GROUP}"
        return ""


def layout_for(bits: int, zeros: np.ndarray | None) -> str:
    """Return the layout of integers of 4 or 8 bits. zeros: all zero points; None = they are in the middle."""
    if bits in _SYMMETRIC and (zeros is None or bool((zeros == 2 ** (bits - 1)).all())):
        return _SYMMETRIC[bits]
    return "zero4" if bits <= 4 else "zero8"


def are_halves(scales: Tensor) -> bool:
    """Whether float16 holds scales exactly."""
    return scales.dtype == torch.float16 or bool((scales.half().to(scales.dtype) == scales).all())


def as_blocks(
    layout: str, q: np.ndarray, scales: Tensor, zeros: np.ndarray | None, groups: InputGroups
) -> QuantizedBlocks:
    """Return integers uint8 [n, k] with scales [n, groups] and zeros uint8 [n, groups] in a layout.

    q may be a view of a transposed array. zeros: None = the layout has none.
    """
    order = None if groups.is_sorted else groups.order
    if order is not None:
        q = q.T[order].T
    n, k = q.shape
    group = np.sort(groups.of)[::GROUP]
    parts = [np.ascontiguousarray(scales.half().numpy()[:, group]).view(np.uint8).reshape(n, -1, 2)]
    if layout.startswith("zero"):
        assert zeros is not None
        parts.append(zeros[:, group, None])
    parts.append(_integers(layout, q.reshape(n, k // GROUP, 2, GROUP // 2) if q.flags.c_contiguous else _blocked(q)))
    blocks = np.concatenate(parts, axis=2).reshape(n, -1)
    return QuantizedBlocks(
        layout, (n, k), torch.from_numpy(blocks), None if order is None else torch.from_numpy(order.astype(np.int32))
    )


def _blocked(q: np.ndarray) -> np.ndarray:
    """Return a view [n, blocks, 2, 16] of integers [n, k], whose memory may be that of [k, n]."""
    return np.moveaxis(q.T.reshape(-1, 2, GROUP // 2, len(q)), 3, 0)


def _integers(layout: str, q: np.ndarray) -> np.ndarray:
    """Return the bytes [n, blocks, bytes] of integers [n, blocks, 2, 16]."""
    if layout in ("q4_0", "zero4"):
        halves: np.ndarray = q[:, :, 0] | q[:, :, 1] << np.uint8(4)
        return halves
    whole: np.ndarray = q.reshape(*q.shape[:2], GROUP)
    return whole if layout == "zero8" else whole ^ np.uint8(128)


def as_floats(q: np.ndarray, scales: Tensor, zeros: np.ndarray | None, bits: int, groups: InputGroups) -> Tensor:
    """Return the numbers [n, k] in float32; the arguments are those of `as_blocks`."""
    zero: np.ndarray | int = 2 ** (bits - 1) if zeros is None else zeros[:, groups.of].astype(np.int16)
    return torch.from_numpy(q.astype(np.int16) - zero).float() * scales.float()[:, groups.of]


def unpacked(words: Tensor, bits: int, axis: int, places: tuple[int, ...] = ()) -> np.ndarray:
    """Return the integers in words int32 [r, c]: uint8 [r * 32 / bits, c] for axis 0, [r, c * 32 / bits] for axis 1.

    places: those of a word's integers in turn, counted in integers from the lowest bits on; () = 0, 1, 2 ...
    """
    whole = words.numpy().view(np.uint32)
    shape, count = list(whole.shape), 32 // bits
    shape.insert(axis + 1, count)
    found = np.empty(shape, np.uint8)
    for number, place in enumerate(places or range(count)):
        np.moveaxis(found, axis + 1, 0)[number] = (whole >> np.uint32(place * bits)).astype(np.uint8)
    found &= np.uint8(2**bits - 1)
    shape[axis : axis + 2] = [shape[axis] * count]
    return found.reshape(shape)
