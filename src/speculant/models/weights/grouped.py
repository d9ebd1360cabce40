"""Matrices of small integers in groups of columns, each with a scale and a zero point, and their rows as blocks.

    w[i, j] = scale[i, g] * (q[i, j] - zero[i, g])      where g is the group of column j

The blocks hold the same numbers. Groups of 64, 128 or all columns repeat their scale in each block of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from speculant.models.weights.layouts import GROUP, layout_of
from speculant.models.weights.modules import ModuleParts
from speculant.models.weights.source import DECODED_AT_ONCE, QuantizedBlocks

_SYMMETRIC = {4: "q4_0", 8: "q8_0"}  # layouts, by bits


@dataclass(frozen=True)
class InputGroups:
    """The groups of a matrix's k columns. of: the group of each column, int64 [k]. count: of groups."""

    of: np.ndarray
    count: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of_size(k: int, size: int) -> InputGroups:
        """Return groups of neighbours, one object for all matrices of a size.

        size: columns of a group; the last one may have fewer.
        """
        return InputGroups(np.arange(k) // size, -(-k // size))

    @cached_property
    def order(self) -> Tensor | None:
        """The columns, sorted by group, int32 [k]; None = they are sorted already."""
        if bool((np.diff(self.of) >= 0).all()):
            return None
        return torch.from_numpy(np.argsort(self.of, kind="stable").astype(np.int32))

    @cached_property
    def why_decoded(self) -> str:
        """The reason why blocks can't have these groups; "" if they can."""
        if len(self.of) % GROUP:
            return f"rows have {len(self.of)} weights, which is not a multiple of {GROUP}"
        sizes = np.bincount(self.of, minlength=self.count)
        if (sizes % GROUP).any():
            return f"groups have {int(sizes[sizes % GROUP != 0][0])} weights, which is not a multiple of {GROUP}"
        return ""


def layout_for(bits: int, zeros: np.ndarray | None) -> str:
    """Return the layout of integers of 4 or 8 bits. zeros: all zero points; None = 2^(bits - 1)."""
    if bits in _SYMMETRIC and (zeros is None or bool((zeros == 2 ** (bits - 1)).all())):
        return _SYMMETRIC[bits]
    return "zero4" if bits <= 4 else "zero8"


def why_no_halves(scales: Tensor) -> str:
    """Return the reason in words if float16 does not hold all scales exactly; else ""."""
    others = 0 if scales.dtype == torch.float16 else int((scales.half().to(scales.dtype) != scales).sum())
    if not others:
        return ""
    few = 100 * others < scales.numel()
    return f"float16 can't hold {'a few of the scales (less than 1%)' if few else 'the scales'}"


def why_scales_are_decoded(parts: ModuleParts, end: str) -> str:
    """Return `why_no_halves` of a tensor, which is not read if it is stored in float16."""
    return "" if parts.kind(end) == "F16" else why_no_halves(parts.read(end).float())


def as_blocks(
    layout: str, q: np.ndarray, scales: Tensor, zeros: np.ndarray | None, groups: InputGroups
) -> QuantizedBlocks:
    """Return integers uint8 [n, k] with scales [n, groups] and zeros uint8 [n, groups] as rows in a layout.

    q may be a transposed view. zeros: None = the layout has none.
    """
    if groups.order is not None:
        q = q.T[groups.order.numpy()].T
    (n, k), group, known = q.shape, np.sort(groups.of)[::GROUP], layout_of(layout)
    assert known is not None
    integers = _integers(layout, q)
    blocks = np.empty((n, k // GROUP, known.size), np.uint8)
    blocks[:, :, :2] = np.ascontiguousarray(scales.half().numpy()[:, group]).view(np.uint8).reshape(n, -1, 2)
    if layout.startswith("zero"):
        assert zeros is not None
        blocks[:, :, 2] = zeros[:, group]
    blocks[:, :, -integers.shape[2] :] = integers
    return QuantizedBlocks(layout, (n, k), torch.from_numpy(blocks.reshape(n, -1)), groups.order)


def _integers(layout: str, q: np.ndarray) -> np.ndarray:
    """Return the bytes [n, blocks, bytes] of integers [n, k]."""
    n, is_transposed = len(q), not q.flags.c_contiguous
    halves = q.T.reshape(-1, 2, GROUP // 2, n) if is_transposed else q.reshape(-1, 2, GROUP // 2)  # [..., n] or [...]
    found: np.ndarray
    if layout in ("q4_0", "zero4"):
        found = halves[:, 0] | halves[:, 1] << np.uint8(4)
    else:
        found = halves if layout == "zero8" else halves ^ np.uint8(128)
    if is_transposed:  # torch does it in tiles, numpy byte by byte
        found = torch.from_numpy(found.reshape(-1, n)).t().contiguous().numpy()
    return found.reshape(n, q.shape[1] // GROUP, -1)


def as_floats(q: np.ndarray, scales: Tensor, zeros: np.ndarray | None, bits: int, groups: InputGroups) -> Tensor:
    """Return the numbers [n, k] in float32; the arguments are those of `as_blocks`. Few rows at a time take memory."""
    found, step = torch.empty(q.shape, dtype=torch.float32, device="cpu"), max(1, DECODED_AT_ONCE // q.shape[1])
    for rows in (slice(first, first + step) for first in range(0, len(q), step)):
        zero: np.ndarray | int = 2 ** (bits - 1) if zeros is None else zeros[rows][:, groups.of].astype(np.int16)
        numbers = torch.from_numpy(q[rows].astype(np.int16) - zero).float()
        torch.mul(numbers, scales[rows].float()[:, groups.of], out=found[rows])
    return found


def unpacked(words: Tensor, bits: int, axis: int, places: tuple[int, ...] = ()) -> np.ndarray:
    """Return the integers in words int32 [r, c]: uint8 [r * 32 / bits, c] for axis 0, [r, c * 32 / bits] for axis 1.

    places: the place of each integer of a word; place 0 has the lowest bits. () = they are in order.
    """
    shape, count = list(words.shape), 32 // bits
    shape.insert(axis + 1, count)
    found = np.empty(shape, np.uint8)
    numbers = np.moveaxis(found, axis + 1, 0)
    for byte, plane in enumerate(np.moveaxis(words.numpy().view(np.uint8).reshape(*words.shape, 4), 2, 0)):
        own = np.ascontiguousarray(plane)
        for shift in range(0, 8, bits):
            place = (8 * byte + shift) // bits
            numbers[places.index(place) if places else place] = own >> np.uint8(shift) & np.uint8(2**bits - 1)
    shape[axis : axis + 2] = [shape[axis] * count]
    return found.reshape(shape)
