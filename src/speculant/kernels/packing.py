"""Packs matrices as their rows are read, so that memory never holds a whole unpacked copy.

panels of a matrix      [ 0 ][ 1 ][ 2 ][ 3 ] ...          each panel holds the same number of rows
interleaved matrices    [ 0 ][ 0'][ 1 ][ 1'] ...          gate and up: a lane each
in 12 bits a weight     index, [ 0 ][ 1 ] ...             plain panels fill a window, then all of them are coded
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.native import INDEX_BYTES, Arena, Kernels, Type, Weight, aligned

CHUNK_BYTES = 2**22  # of rows converted at once; a chunk has at least one panel per thread
WINDOW_BYTES = 2**23  # of plain panels coded at once, so that they stay in the processor's caches
LIKELY_CODED = 0.755  # of the bytes of plain panels
LEAST_SHARE = 4  # panels of a window for each thread

Read = Callable[[], Tensor]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size


@dataclass(frozen=True)
class Packer:
    """Packs matrices [n, k] into the arena. Rows of floats are rounded to `dtype` first, float32 or bfloat16.

    float16 rows for the type F16, and uint8 rows of blocks, are packed as they are.
    """

    kernels: Kernels
    dtype: torch.dtype
    arena: Arena

    def pack(self, type_: Type, n: int, k: int, lanes: Sequence[Sequence[Read]]) -> Weight:
        """Pack a matrix for each lane, interleaved panel by panel; the reads of a lane return its rows in parts.

        Plain lanes are read one after the other, coded ones at the same time.
        """
        if type_ == Type.BF12:
            return self._pack_coded(n, k, lanes)
        weight = allocate(self.kernels, type_, n, k, len(lanes), self.arena)
        for index, reads in enumerate(lanes):
            lane = Lane(self.kernels, weight, self.dtype, index, len(lanes))
            for read in reads:
                lane.write(read())
            lane.close()
        return weight

    def _pack_coded(self, n: int, k: int, lanes: Sequence[Sequence[Read]]) -> Weight:
        coder = Coder(self.kernels, n, k, len(lanes), self.arena)
        windows = [Lane(self.kernels, coder.window, self.dtype, index, len(lanes)) for index in range(len(lanes))]
        for rows in zip(*(_blocks(reads, coder.rows) for reads in lanes), strict=True):
            for lane, own in zip(windows, rows, strict=True):
                for part in own:
                    lane.write(part)
                lane.close()
                lane.rewind()
            coder.code(sum(map(len, rows[0])))
        return coder.weight()


class Coder:
    """Codes a matrix of bfloat16, or several that are interleaved, window by window.

    window: memory for the plain panels of `rows` rows of each lane.
    """

    def __init__(self, kernels: Kernels, n: int, k: int, lanes: int, arena: Arena) -> None:
        self._kernels, self._n, self._k, self._lanes, self._arena = kernels, n, k, lanes, arena
        self._height = panel_rows(kernels)
        panels = -(-n // self._height) * lanes
        most = max(LEAST_SHARE * kernels.threads, WINDOW_BYTES // kernels.packed_bytes(Type.BF16, 1, k)) // lanes
        self.rows = min(max(1, most), panels // lanes) * self._height
        window = arena.scratch(kernels.packed_bytes(Type.BF16, self.rows, k) * lanes)
        self.window = Weight(window, Type.BF16, self.rows, k)
        self._memory = arena.take(kernels.most_coded_bytes(panels, k), likely_bytes(kernels, Type.BF12, n, k, lanes))
        self._done, self._used = 0, -(-INDEX_BYTES * panels // 64) * 64  # panels, and bytes

    def code(self, rows: int) -> None:
        """Code the first `rows` rows of each lane of the window."""
        panels, entry = -(-rows // self._height) * self._lanes, INDEX_BYTES * self._done
        index = self._memory.data_ptr() + entry
        end = self._kernels.code_panels(self.window.address, panels, self._k, index, self._used - entry)
        self._done, self._used = self._done + panels, end + entry

    def weight(self) -> Weight:
        """Return the coded matrix. Call it after all rows were coded."""
        return Weight(self._arena.keep(self._memory, self._used), Type.BF12, self._n, self._k)


def _blocks(reads: Sequence[Read], count: int) -> Iterator[list[Tensor]]:
    """Yield blocks of `count` rows, each as a list of parts; the last block may have fewer rows."""
    block, missing = list[Tensor](), count
    for read in reads:
        rows = read()
        while len(rows):
            block.append(rows[:missing])
            rows, missing = rows[missing:], missing - len(rows[:missing])
            if not missing:
                yield block
                block, missing = [], count
    if block:
        yield block


def allocate(kernels: Kernels, type_: Type, n: int, k: int, lanes: int = 1, arena: Arena | None = None) -> Weight:
    """Return memory for `lanes` interleaved matrices [n, k]; one `Lane` writes each of them."""
    size = kernels.packed_bytes(type_, n, k) * lanes
    return Weight(aligned(size) if arena is None else arena.keep(arena.take(size, size), size), type_, n, k)


class Lane:
    """Writes one matrix of a weight in the order of its rows. See `Packer` for their types.

    Rows that do not fill a panel are held until more rows follow.
    """

    def __init__(self, kernels: Kernels, weight: Weight, dtype: torch.dtype, index: int = 0, lanes: int = 1) -> None:
        self._kernels, self._type, self._lanes = kernels, weight.type, lanes
        self._panel = kernels.packed_bytes(weight.type, 1, weight.k)
        self._first = self._address = weight.address + index * self._panel  # of the next panel
        self._height = panel_rows(kernels)
        self._chunk = max(kernels.threads, CHUNK_BYTES // (4 * weight.k * self._height)) * self._height
        self._panel_rows = torch.empty(
            self._height, weight.k, dtype=torch.float16 if weight.type == Type.F16 else dtype
        )
        self._held = 0  # rows of it
        self._converted: Tensor | None = None  # scratch for a chunk, allocated when it is needed

    def write(self, rows: Tensor) -> None:
        """Pack rows [m, k] of any floating type on the CPU, or blocks [m, bytes], after the rows written before."""
        if rows.dtype == torch.uint8 and self._panel_rows.dtype != torch.uint8:
            self._panel_rows = rows.new_empty(self._height, rows.shape[1])
        begun = min(-self._held % self._height, len(rows))  # these rows complete the current panel
        self._hold(rows[:begun])
        whole = begun + (len(rows) - begun) // self._height * self._height
        chunk = self._chunk if rows.dtype != self._panel_rows.dtype else max(1, whole - begun)
        for first in range(begun, whole, chunk):
            self._put(rows[first : min(first + chunk, whole)])
        self._hold(rows[whole:])

    def close(self) -> None:
        """Pack the rows still held; the rest of their panel is zeros."""
        self._put(self._panel_rows[: self._held])
        self._held = 0

    def rewind(self) -> None:
        """Begin again at the first panel."""
        self._address = self._first

    def _hold(self, rows: Tensor) -> None:
        copy_rows(rows, self._panel_rows[self._held : self._held + len(rows)])
        self._held += len(rows)
        if self._held == self._height:
            self.close()

    def _put(self, rows: Tensor) -> None:
        if rows.dtype != self._panel_rows.dtype:
            rows = self._convert(rows)
        self._kernels.pack_panels(self._type, rows, self._address, self._lanes)
        self._address += -(-len(rows) // self._height) * self._panel * self._lanes

    def _convert(self, rows: Tensor) -> Tensor:
        if self._converted is None:
            self._converted = self._panel_rows.new_empty(self._chunk, rows.shape[1])
        return self._converted[: len(rows)].copy_(rows)


def copy_rows(rows: Tensor, out: Tensor) -> None:
    """Copy rows. Without a change of type only this thread works: torch's threads would disturb the kernels'."""
    if rows.dtype != out.dtype:
        out.copy_(rows)
        return
    bits = _INTEGERS[out.dtype.itemsize]  # numpy has no bfloat16
    out.view(bits).numpy()[...] = rows.detach().view(bits).numpy()


def likely_bytes(kernels: Kernels, type_: Type, n: int, k: int, lanes: int = 1) -> int:
    """Estimate the bytes of `lanes` matrices [n, k], seldom too high."""
    if type_ == Type.BF12:
        return int(LIKELY_CODED * kernels.packed_bytes(Type.BF16, n, k)) * lanes
    return kernels.packed_bytes(type_, n, k) * lanes


def panel_rows(kernels: Kernels) -> int:
    """Return the number of rows in a panel: the most rows that take the bytes of one row."""
    rows, panel = 1, kernels.packed_bytes(Type.F32, 1, 1)
    while kernels.packed_bytes(Type.F32, rows + 1, 1) == panel:
        rows += 1
    return rows
