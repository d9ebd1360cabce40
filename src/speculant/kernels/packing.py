"""Packs a matrix as its rows are read, so that memory never holds a whole unpacked copy.

panels of a matrix      [ 0 ][ 1 ][ 2 ][ 3 ] ...          each panel holds the same number of rows
interleaved matrices    [ 0 ][ 0'][ 1 ][ 1'] ...          gate and up: a lane each
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculant.kernels.memory import aligned
from speculant.kernels.native import Kernels, Type, Weight

CHUNK_BYTES = 2**22  # of rows that are converted at once; a chunk has at least one panel per thread


def allocate(kernels: Kernels, type_: Type, n: int, k: int, lanes: int = 1) -> Weight:
    """Return memory for `lanes` interleaved matrices [n, k]; one `Lane` writes each of them."""
    return Weight(aligned(kernels.packed_bytes(type_, n, k) * lanes), type_, n, k)


class Lane:
    """Writes one matrix of a weight in the order of its rows. Rows are rounded to `dtype` before they are packed.

    dtype is float32 or bfloat16. Rows that do not fill a panel are held until more rows follow.
    """

    def __init__(self, kernels: Kernels, weight: Weight, dtype: torch.dtype, index: int = 0, lanes: int = 1) -> None:
        self._kernels, self._type, self._lanes = kernels, weight.type, lanes
        self._panel = kernels.packed_bytes(weight.type, 1, weight.k)
        self._address = weight.address + index * self._panel  # of the next panel
        self._height = panel_rows(kernels)
        self._chunk = max(kernels.threads, CHUNK_BYTES // (4 * weight.k * self._height)) * self._height
        self._held = torch.empty(0, weight.k, dtype=dtype)
        self._converted: Tensor | None = None  # scratch for a chunk, allocated when it is needed

    def write(self, rows: Tensor) -> None:
        """Pack rows [m, k] of any floating type on the CPU after the rows written before."""
        begun = min(-len(self._held) % self._height, len(rows))  # these rows complete the current panel
        self._hold(rows[:begun])
        whole = begun + (len(rows) - begun) // self._height * self._height
        for first in range(begun, whole, self._chunk):
            self._put(rows[first : min(first + self._chunk, whole)])
        self._hold(rows[whole:])

    def close(self) -> None:
        """Pack the rows still held; the rest of their panel is zeros."""
        self._put(self._held)

    def _hold(self, rows: Tensor) -> None:
        self._held = torch.cat([self._held, rows.to(self._held)])
        if len(self._held) == self._height:
            self._put(self._held)
            self._held = self._held[:0]

    def _put(self, rows: Tensor) -> None:
        if rows.dtype != self._held.dtype:
            rows = self._convert(rows)
        self._kernels.pack_panels(self._type, rows, self._address, self._lanes)
        self._address += -(-len(rows) // self._height) * self._panel * self._lanes

    def _convert(self, rows: Tensor) -> Tensor:
        if self._converted is None:
            self._converted = self._held.new_empty(self._chunk, rows.shape[1])
        return self._converted[: len(rows)].copy_(rows)


def panel_rows(kernels: Kernels) -> int:
    """Return the number of rows in a panel: the most that take no more bytes than one row."""
    rows, panel = 1, kernels.packed_bytes(Type.F32, 1, 1)
    while kernels.packed_bytes(Type.F32, rows + 1, 1) == panel:
        rows += 1
    return rows
