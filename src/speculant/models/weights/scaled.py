"""Matrices of integers or of e4m3, with a scale for each group of columns or tile, and their rows as blocks.

    w[i, j] = scale[i, g] * (q[i, j] - zero[i, g])                        where g is the group of column j
    w[i, j] = scale[i // rows, j // columns] * (number[i, j] - zero)      zero: 0, or one for each scale of integers

The blocks hold the same numbers. Groups of 64, 128 or all columns repeat their scale in each block of 32. Rows of int8
with one scale keep it in float32, as blocks of 128 in e4m3 do. Other integers become blocks of 32 if float16 holds
their scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from speculant.models.weights.formats import BELONGS
from speculant.models.weights.source import (
    DECODED_AT_ONCE,
    FP8_BLOCK,
    GROUP,
    SCALE_SIZE,
    JoinedMatrix,
    QuantizedBlocks,
    e4m3_numbers,
    layout_of,
)
from speculant.models.weights.tensors import AGAIN, ModuleParts

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


SCALE_KINDS = ("BF16", "F16", "F32", "F8_E8M0")
SCALES_OF_16 = ("BF16", "F16", "F32")
WORD = 32  # bits
OF_CACHE = (
    ".kv_scale", ".q_scale", ".k_scale", ".v_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""The ends of the names of scales for keys and values, which are not rounded here."""
LARGEST = 448.0  # number of e4m3
MIDDLE = 128  # the zero of int8 as uint8


@dataclass(frozen=True)
class Tile:
    """The rows and columns of a matrix that have a scale together."""

    rows: int
    columns: int

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of tiles along the rows and the columns of a matrix."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def by_row(self, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the scales of each row, [n, tiles]."""
        return scales.reshape(self.counts(shape)).repeat_interleave(self.rows, 0)[: shape[0]]


def tile_of(parts: ModuleParts, end: str, shape: tuple[int, ...], named: Tile | None = None) -> Tile:
    """Return the tiles that the scales of a matrix have: the whole matrix, a row, or those that config.json names.

    Raises ModelError if the scales' shape fits none of them.
    """
    found, (n, k) = parts.shape(end), shape
    if parts.kind(end) not in SCALE_KINDS:
        raise parts.error(f"{parts.module}{end} is {parts.kind(end)} instead of {' or '.join(SCALE_KINDS)}")
    fits = named is None or math.prod(found) == math.prod(named.counts(shape))
    if fits and math.prod(found) == 1 and len(found) <= 2:
        return Tile(n, k)
    if fits and found in ((n,), (n, 1)):
        return Tile(1, k)
    if named is not None and found == named.counts(shape):
        return named
    parted = f" in parts of {named.rows} x {named.columns}" if named else ""
    raise parts.error(
        f"{parts.module}{end} is {list(found)}, which does not fit a matrix {list(shape)}{parted}",
        BELONGS,
    )


def matrix_shape(parts: ModuleParts, end: str, kind: str) -> tuple[int, ...]:
    """Return the shape of a matrix of numbers of a kind. Raises ModelError for another kind, or no matrix."""
    shape = parts.shape(end)
    if parts.kind(end) != kind or len(shape) != 2 or 0 in shape:
        raise parts.error(f"{parts.module}{end} is {parts.kind(end)} {list(shape)} instead of a matrix of {kind}")
    return shape


def read_scales(parts: ModuleParts, end: str) -> Tensor:
    """Read scales in float32. Raises ModelError for scales that are not finite."""
    scales = parts.read(end).float()
    if not bool(scales.isfinite().all()):
        raise parts.error(f"{parts.module}{end} has scales that are NaN or infinite", AGAIN)
    return scales


def fp8_matrix(parts: ModuleParts, weight: str, scale: str, named: Tile | None) -> JoinedMatrix:
    """Return a matrix in e4m3. weight, scale: the ends of the names of numbers and scales. named: see `tile_of`.

    Raises ModelError for scales that do not fit it; when it is read, for numbers or scales that are NaN or too large.
    """
    shape = matrix_shape(parts, weight, "F8_E4M3")
    tile = tile_of(parts, scale, shape, named)
    fits = tile.columns >= shape[1] or tile.columns % FP8_BLOCK == 0
    why = "" if fits else f"a scale belongs to {tile.columns} inputs, which is not a multiple of {FP8_BLOCK}"

    def read() -> Tensor | QuantizedBlocks:
        numbers, scales, k = parts.read(weight).view(torch.uint8), read_scales(parts, scale), shape[1]
        if int((numbers & 127).max()) == 127:
            raise parts.error(f"{parts.module}{weight} has numbers that are NaN", AGAIN)
        if not bool((scales * LARGEST).isfinite().all()):
            raise parts.error(f"{parts.module}{scale} has scales that make weights infinite", AGAIN)
        by_row = tile.by_row(scales, shape)
        if fits:
            return fp8_rows(numbers, by_row[:, torch.arange(0, k, FP8_BLOCK) // tile.columns])
        return torch.from_numpy(e4m3_numbers()[numbers.numpy()]) * by_row.repeat_interleave(tile.columns, 1)[:, :k]

    return JoinedMatrix(shape, "FP8" if fits else "E4M3", read, why)


def fp8_rows(numbers: Tensor, scales: Tensor) -> QuantizedBlocks:
    """Return numbers in e4m3, uint8 [n, k], with scales [n, blocks of 128] in float32, in the layout fp8."""
    (n, k), blocks = numbers.shape, scales.shape[1]
    rows, whole = torch.empty(n, blocks, SCALE_SIZE + FP8_BLOCK, dtype=torch.uint8), k // FP8_BLOCK
    rows[:, :, :SCALE_SIZE] = scales.contiguous().view(torch.uint8).view(n, blocks, SCALE_SIZE)
    rows[:, :whole, SCALE_SIZE:] = numbers[:, : whole * FP8_BLOCK].reshape(n, whole, FP8_BLOCK)
    if rest := k - whole * FP8_BLOCK:
        rows[:, whole, SCALE_SIZE : SCALE_SIZE + rest] = numbers[:, -rest:]
    return QuantizedBlocks("fp8", (n, k), rows.view(n, -1)[:, : k + SCALE_SIZE * blocks].contiguous())


def int8_rows(numbers: Tensor, scales: Tensor) -> QuantizedBlocks:
    """Return numbers in int8 or its bytes, [n, k], with a scale for each row, [n, 1] in float32, in the layout int8."""
    rows = torch.cat((scales.contiguous().view(torch.uint8), numbers.view(torch.uint8)), dim=1)
    return QuantizedBlocks("int8", tuple(numbers.shape), rows)


def read_groups(parts: ModuleParts, end: str, k: int, size: int) -> InputGroups:
    """Return the groups of k inputs; neighbours if there is no such tensor. Raises ModelError for other sizes."""
    expected = InputGroups.of_size(k, size)
    if not parts.has(end):
        return expected
    found = parts.read(end).numpy().astype(np.int64)
    if np.array_equal(found, expected.of):
        return expected
    if not np.array_equal(np.sort(found), expected.of):
        raise parts.error(f"{parts.module}{end} does not divide the inputs into groups of {size}")
    return InputGroups(found, expected.count)


def integer_matrix(
    name: str, parts: ModuleParts, shape: tuple[int, ...], bits: int, scale: str, by_row: Callable[[Tensor], Tensor],
    integers: Callable[[], np.ndarray], zeros: Callable[[], np.ndarray | None], groups: InputGroups,
    rows: Callable[[], Tensor] | None = None,
) -> JoinedMatrix:  # fmt: skip
    """Return a matrix of integers in groups of columns, each with a scale and a zero point.

    name: its kind if it is decoded. scale: the end of the scales' name; by_row: makes [n, groups] of these. integers:
    reads them, uint8 [n, k], perhaps a transposed view. zeros: reads the zero points, uint8 [n, groups]; its result
    None = 2^(bits - 1). rows: reads integers of 8 bits as int8, for rows that keep their only scale; None = they become
    blocks. Reading raises ModelError for scales that are not finite.
    """
    layout = layout_for(bits, zeros())
    keeps_rows = layout == "q8_0" and rows is not None and groups.count == 1
    why = "" if keeps_rows else groups.why_decoded or why_scales_are_decoded(parts, scale)

    def read() -> Tensor | QuantizedBlocks:
        scales = by_row(read_scales(parts, scale))
        if keeps_rows and rows is not None:
            return int8_rows(rows(), scales)
        if why:
            return as_floats(integers(), scales, zeros(), bits, groups)
        return as_blocks(layout, integers(), scales, zeros(), groups)

    kind = "INT8" if keeps_rows else name if why else layout.upper()
    return JoinedMatrix(shape, kind, read, why, None if why else groups.order)
