"""Sources of a model's tensors, and the layouts of rows of quantised weights. Tensors are read on request.

Layouts are GGUF's blocks, and four of our own:

zero4   32 weights in 19 bytes: scale in float16, zero point in uint8, and 16 bytes with two integers of 4 bits each,
        the first 16 in the lower halves and the last 16 in the upper ones
zero8   32 weights in 35 bytes: scale in float16, zero point in uint8, and 32 integers in uint8
int8    a row in k + 4 bytes: scale in float32, and k integers in int8
fp8     128 weights in 132 bytes: scale in float32, and 128 numbers in e4m3 (arXiv 2209.05433); the last block of a row
        may have fewer

A weight is scale * (q - zero), or scale * q in int8 and fp8.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.errors import Converts, ModelError
from speculant.files import Stamp, TensorPlace
from speculant.models.description import (
    SAME_NAMES,
    Columns,
    Expression,
    Flattened,
    LogOfNegative,
    Operation,
    Picked,
    Plus,
    RowOperation,
    Stacked,
    TensorMap,
    Unsqueezed,
    UntiledColumns,
    stored_name,
)
from speculant.models.functions import logarithm

GROUP = 32  # weights of a block
FP8_BLOCK, SCALE_SIZE = 128, 4  # weights of a block of fp8; bytes of a scale in float32
DECODED_BITS = {"GPTQ": 4, "AWQ": 4, "PACKED4": 4, "PACKED8": 8, "E4M3": 8, "NF4": 4, "FP4": 4}
"""Kinds of matrices that a source decodes, because no layout holds them, and the bits of a weight without scales."""


@dataclass(frozen=True)
class BlockLayout:
    """Rows of blocks. weights: in a block. size: of a block, in bytes.

    decode: returns the numbers [n, k] in float32 of rows [n, bytes]; None = they can't be decoded. divides: whether
    some successive blocks of a row are a row of the same layout.
    """

    weights: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray] | None
    divides: bool = True


def layout_of(name: str) -> BlockLayout | None:
    """Return a layout, or a floating-point type of GGUF, by its name in upper or lower case; None = unknown."""
    return OWN.get(name.lower()) or _gguf_layout(name.upper())


def stored_bits(kind: str) -> float:
    """Return the bits that a weight takes in a file; see `WeightSource.kind`."""
    layout = layout_of(kind)
    return DECODED_BITS[kind] if layout is None else 8 * layout.size / layout.weights


@functools.cache
def _gguf_layout(kind: str) -> BlockLayout | None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    type_ = GGMLQuantizationType.__members__.get(kind)
    if type_ is None:
        return None
    weights, size = GGML_QUANT_SIZES[type_]
    try:
        dequantize(np.zeros((1, size), np.uint8), type_)
    except NotImplementedError:
        return BlockLayout(weights, size, None)
    return BlockLayout(weights, size, lambda rows: dequantize(rows, type_))


def _decode_with_zeros(rows: np.ndarray, bits: int) -> np.ndarray:
    blocks = np.ascontiguousarray(rows).reshape(-1, OWN[f"zero{bits}"].size)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    q = blocks[:, 3:]
    if bits == 4:
        q = np.concatenate((q & 15, q >> 4), axis=1)
    decoded: np.ndarray = scales * (q.astype(np.float32) - blocks[:, 2:3])
    return decoded.reshape(len(rows), -1)


def _decode_int8(rows: np.ndarray) -> np.ndarray:
    scales = np.ascontiguousarray(rows[:, :SCALE_SIZE]).view(np.float32)
    decoded: np.ndarray = scales * rows[:, SCALE_SIZE:].view(np.int8)
    return decoded


def _decode_fp8(rows: np.ndarray) -> np.ndarray:
    """Decode rows of e4m3, with a table of all bytes."""
    size, n = FP8_BLOCK + SCALE_SIZE, len(rows)
    whole = np.zeros((n, -(-rows.shape[1] // size), size), np.uint8)
    whole.reshape(n, -1)[:, : rows.shape[1]] = rows
    scales = np.ascontiguousarray(whole[:, :, :SCALE_SIZE]).view(np.float32)
    decoded: np.ndarray = scales * e4m3_numbers()[whole[:, :, SCALE_SIZE:]]
    return decoded.reshape(n, -1)[:, : rows.shape[1] - SCALE_SIZE * whole.shape[1]]


@functools.cache
def e4m3_numbers() -> np.ndarray:
    """Return the numbers of all bytes in e4m3, float32 [256]; two are NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    sizes[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, sizes, -sizes).astype(np.float32)


OWN = {
    "int8": BlockLayout(1, 1, _decode_int8, divides=False),
    "fp8": BlockLayout(FP8_BLOCK, FP8_BLOCK + SCALE_SIZE, _decode_fp8),
    "zero4": BlockLayout(GROUP, 19, functools.partial(_decode_with_zeros, bits=4)),
    "zero8": BlockLayout(GROUP, 35, functools.partial(_decode_with_zeros, bits=8)),
}


FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by kind
DECODED_AT_ONCE = 2**22  # weights
CONFIG = "config.json"
_KINDS = {dtype: kind for kind, dtype in FLOATS.items()}
_STORED = {
    **FLOATS, "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix that is stored as blocks of small integers with scales, as GGUF and GPTQ files have them.

    shape is the matrix's, [n, k], or that of stacked matrices [m, n, k]. `blocks` holds the bytes of each row,
    [n, bytes] or [m n, bytes], in the order that `layout` names, such as "q4_0"; see the module. They may be mapped
    from a file. order: see `WeightSource.order`.
    """

    layout: str
    shape: tuple[int, ...]
    blocks: Tensor
    order: Tensor | None = None


class WeightSource(Protocol):
    """Tensors by name. The caller owns a tensor that was read, and drops it before it reads the next one."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        ...

    def kind(self, name: str) -> str:
        """Return the type that a tensor is stored in without reading it: F32, BF16, Q4_K.

        The names are those of safetensors and of GGUF, in capitals. Kinds that are not in FLOATS are blocks, which
        `read` may decode.
        """
        ...

    def order(self, name: str) -> Tensor | None:
        """Return the number of the matrix's column that each stored column of blocks is, int32 [k].

        None = the columns are in order, or it is not in blocks.
        """
        return None

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """Read a tensor in the type it is stored in."""
        ...

    def read_stacked(self, name: str, index: int) -> Tensor | QuantizedBlocks:
        """Read one of the tensors that a tensor consists of, by the index of its first dimension."""
        return take_stacked(self.read(name), index)


@dataclass(frozen=True)
class JoinedMatrix:
    """A matrix [n, k] of several stored tensors, or stacked matrices, whose headers have been checked.

    kind: the layout of the blocks that `read` returns, in capitals; or a key of DECODED_BITS: it returns numbers in
    float32, for the reason `why_decoded`. order: see `WeightSource.order`. part: reads one of stacked matrices.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor | QuantizedBlocks]
    why_decoded: str = ""
    order: Tensor | None = None
    part: Callable[[int], QuantizedBlocks] | None = None


@dataclass(frozen=True)
class StoredWeights(WeightSource):
    """The tensors of a checkpoint's files. Until `read`, only headers are read.

    places: of tensors that are stored as they are. place: the folder or the file, for messages. files: all of them.
    described_by: the source of the model's description, for messages. joined: matrices of several tensors.
    """

    places: Mapping[str, TensorPlace]
    place: Path
    files: Sequence[Path]
    described_by: str = CONFIG
    joined: Mapping[str, JoinedMatrix] = field(default_factory=dict)
    _last: dict[str, Tensor | QuantizedBlocks] = field(default_factory=dict, init=False, repr=False, compare=False)

    @override
    def names(self) -> Collection[str]:
        return [*self.places, *self.joined]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape

    @override
    def kind(self, name: str) -> str:
        return self._of(name).kind

    def _of(self, name: str) -> TensorPlace | JoinedMatrix:
        return self.joined.get(name) or self.places[name]

    @override
    def order(self, name: str) -> Tensor | None:
        return self.joined[name].order if name in self.joined else None

    @override
    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """The last joined matrix is kept until the next read: parts of a fused one, such as Phi-3's qkv_proj, follow.

        Raises ModelError if a file can't be read any longer.
        """
        if name not in self._last:
            self._last.clear()  # before the next one takes memory
            if name not in self.joined:
                return _stored(self.places[name])
            self._last[name] = self.joined[name].read()
        return self._last[name]

    @override
    def read_stacked(self, name: str, index: int) -> Tensor | QuantizedBlocks:
        self._last.clear()
        if name in self.places:
            return _stored(self.places[name].part(index))
        part = self.joined[name].part
        return super().read_stacked(name, index) if part is None else part(index)

    def stamps(self) -> list[Stamp]:
        """Return the stamps of all files."""
        return [Stamp.of(file) for file in self.files]

    def quantised_kinds(self) -> list[str]:
        """Return the kinds of quantised tensors, such as Q4_K; empty if all are floating-point numbers."""
        return sorted({self.kind(name) for name in self.names()} - _STORED.keys())

    def common_dtype(self) -> torch.dtype:
        """Return the type of most weights; for quantised ones bfloat16, the type of keys and values."""
        if self.quantised_kinds():
            return torch.bfloat16
        sizes = Counter[str]()
        for place in self.places.values():
            sizes[place.kind] += math.prod(place.shape) if place.kind in FLOATS else 0
        return FLOATS[sizes.most_common(1)[0][0]]


def map_tensor(place: TensorPlace) -> Tensor:
    """Map a tensor, or the bytes [rows, bytes] of one in blocks.

    Changes to it stay in memory. Each has its own mapping, because a mapping keeps read pages. Raises ModelError.
    """
    if place.kind not in _STORED and layout_of(place.kind) is None:
        raise ModelError(f"{place.file} has a tensor of the type {place.kind}, which can't be read", "convert it.")
    dtype = _STORED.get(place.kind, torch.uint8)
    with Converts(ModelError, f"{place.file} can't be read", "download it again."), place.file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size < place.offset + place.size:
            raise ValueError("it has become shorter since it was opened")
        if not place.size:
            return torch.empty(place.shape, dtype=dtype, device="cpu")
        ahead = place.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(opened.fileno(), ahead + place.size, access=mmap.ACCESS_COPY, offset=place.offset - ahead)
        content = torch.frombuffer(mapped, dtype=dtype, offset=ahead)
    return content.view(place.shape if place.kind in _STORED else (math.prod(place.shape[:-1]), -1))


def _stored(place: TensorPlace) -> Tensor | QuantizedBlocks:
    """Map a tensor or blocks; a vector in blocks is decoded."""
    content, shape = map_tensor(place), place.shape
    if place.kind in _STORED:
        return content
    blocks = QuantizedBlocks(place.kind.lower(), shape if len(shape) > 1 else (1, *shape), content)
    return blocks if len(shape) > 1 else decode(blocks, torch.float32)[0]


def read_plain(weights: WeightSource, name: str) -> Tensor:
    """Read a tensor of floating-point numbers; blocks are decoded to float32, exactly.

    Raises ModelError for a layout that can't be decoded.
    """
    return plain(weights.read(name), name)


def plain(tensor: Tensor | QuantizedBlocks, name: str) -> Tensor:
    """Return the numbers of a tensor; see `read_plain`."""
    if not isinstance(tensor, QuantizedBlocks):
        return tensor
    if not decodable(tensor.layout):
        raise ModelError(
            f"{name} is stored in blocks of the layout {tensor.layout!r}, which can't be decoded",
            "use the unquantised checkpoint it came from.",
        )
    return decode(tensor, torch.float32)


def decodable(layout: str) -> bool:
    """Whether blocks of a layout can be decoded."""
    known = layout_of(layout)
    return known is not None and known.decode is not None


def decode(stored: QuantizedBlocks, dtype: torch.dtype) -> Tensor:
    """Return the numbers [n, k] of blocks, rounded to a type. Only a few rows at a time take memory in float32."""
    layout = layout_of(stored.layout)
    assert layout is not None
    assert layout.decode is not None
    decoded = torch.empty(stored.shape, dtype=dtype, device="cpu")
    step = max(1, DECODED_AT_ONCE // stored.shape[1])
    columns = slice(None) if stored.order is None else stored.order.long()
    with np.errstate(all="ignore"):  # of scales that are not finite
        for first in range(0, stored.shape[0], step):
            rows = torch.from_numpy(layout.decode(stored.blocks[first : first + step].numpy()))
            decoded[first : first + step, columns] = rows.to(dtype)
    return decoded


def take_rows(stored: Tensor | QuantizedBlocks, rows: Sequence[int] | Tensor) -> Tensor | QuantizedBlocks:
    """Return the rows with these indices; blocks stay blocks."""
    if isinstance(stored, QuantizedBlocks):
        blocks = _take(stored.blocks, rows)
        return replace(stored, shape=(len(blocks), *stored.shape[1:]), blocks=blocks)
    return _take(stored, rows)


def _take(tensor: Tensor, rows: Sequence[int] | Tensor) -> Tensor:
    """Return rows of a tensor. Numpy copies whole rows, without torch's threads, which slow the kernels' threads."""
    content = tensor.detach().contiguous().view(len(tensor), -1).view(torch.uint8).numpy()
    taken = torch.from_numpy(content.take(np.asarray(rows, np.int64), axis=0))
    return taken.view(tensor.dtype).view(-1, *tensor.shape[1:])


def _take_columns(stored: Tensor | QuantizedBlocks, columns: Columns) -> Tensor | QuantizedBlocks:
    """Return columns of a matrix; blocks stay blocks if no block is divided."""
    if isinstance(stored, QuantizedBlocks):
        layout = layout_of(stored.layout)
        if layout is None or stored.order is not None or not _has_whole_blocks(columns, stored.layout):
            stored = plain(stored, stored_name(columns))
        else:
            weights, size = layout.weights, layout.size
            blocks = stored.blocks.narrow(1, columns.first // weights * size, columns.size // weights * size)
            return QuantizedBlocks(stored.layout, (*stored.shape[:1], columns.size), blocks.contiguous())
    return stored.narrow(-1, columns.first, columns.size).contiguous()


def _untile_columns(stored: Tensor | QuantizedBlocks, made: UntiledColumns) -> Tensor | QuantizedBlocks:
    """Return a matrix with its columns in the model's order; blocks across heads stay in place and get an order."""
    if not isinstance(stored, QuantizedBlocks):
        return _untile_bytes(stored.contiguous(), made)
    if stored.order is not None:
        return _untile_bytes(plain(stored, stored_name(made)), made)
    if _divides_heads(made, stored.layout, stored.shape[-1]):
        return replace(stored, blocks=_untile_bytes(stored.blocks, made))
    return replace(stored, order=_order_of(made, stored.shape[-1]))


def _untile_bytes(rows: Tensor, made: UntiledColumns) -> Tensor:
    """Move the equal parts that the heads have of each row."""
    heads = rows.view(torch.uint8).numpy().reshape(len(rows), made.heads, -1)[:, made.columns(made.heads)]
    return torch.from_numpy(heads.reshape(len(rows), -1)).view(rows.dtype)


def _order_of(made: UntiledColumns, width: int) -> Tensor:
    return torch.tensor(made.order(width), dtype=torch.int32, device="cpu")


def _divides_heads(made: UntiledColumns, kind: str, width: int) -> bool:
    """Whether each head's columns are whole blocks of a kind."""
    return _has_whole_blocks(Columns(made.of, 0, width // made.heads, width), kind)


def take_stacked(stored: Tensor | QuantizedBlocks, index: int) -> Tensor | QuantizedBlocks:
    """Return one of stacked tensors; blocks stay blocks."""
    if not isinstance(stored, QuantizedBlocks):
        return stored[index]
    count, *shape = stored.shape
    return replace(stored, shape=tuple(shape), blocks=stored.blocks.view(count, shape[0], -1)[index])


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a tensor of floating-point numbers; see `WeightSource.kind`."""
    return _KINDS[tensor.dtype]


def stored_bytes(kind: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor in a file; see `WeightSource.kind`."""
    return int(math.prod(shape) * stored_bits(kind)) // 8


def counted_kinds(weights: WeightSource) -> Counter[str]:
    """Return how many matrices are stored in each kind, in lower case."""
    return Counter(weights.kind(name).lower() for name in weights.names() if len(weights.shape(name)) == 2)


def listed_kinds(kinds: Mapping[str, int]) -> str:
    """Return the numbers of matrices by kind as text, the largest number first."""
    (first, number), *others = sorted(kinds.items(), key=lambda each: (-each[1], each[0]))
    matrices = "matrix" if number == 1 else "matrices"
    return ", ".join([f"{first} {number} {matrices}", *(f"{kind} {count}" for kind, count in others)])


def has_blocks(weights: WeightSource) -> bool:
    """Whether a source stores any of its tensors in blocks."""
    return any(weights.kind(name) not in FLOATS for name in weights.names())


@dataclass(frozen=True)
class Mapped(WeightSource):
    """A source whose tensors have the model's names, and are made from stored ones.

    shapes: of each; tensors: how it is made. `check` requires that each was read, or that its shape was compared with
    that of a packed one.
    """

    source: WeightSource
    shapes: Mapping[str, tuple[int, ...]]
    tensors: TensorMap = SAME_NAMES
    _used: set[str] = field(default_factory=set, repr=False, compare=False)

    def with_rows(self, chosen: Mapping[str, tuple[str, Sequence[int]]]) -> Mapped:
        """Return the source in which some tensors consist of rows of others: for each, the other's name, and rows."""
        made = {
            name: Picked(self.tensors.expression(other), rows, self.shapes[other][0])
            for name, (other, rows) in chosen.items()
        }
        shapes = {name: (len(rows), *self.shapes[other][1:]) for name, (other, rows) in chosen.items()}
        tensors = replace(self.tensors, names=(*self.tensors.names, *made.items()))
        return Mapped(self.source, {**self.shapes, **shapes}, tensors)

    @override
    def names(self) -> Collection[str]:
        return self.shapes.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        self._used.add(name)
        return self.shapes[name]

    @override
    def kind(self, name: str) -> str:
        made = self.tensors.expression(name)
        kind, is_ordered = self.source.kind(stored_name(made)), self.source.order(stored_name(made)) is not None
        return kind if kind in FLOATS or _keeps_blocks(made, kind, is_ordered) else "F32"

    @override
    def order(self, name: str) -> Tensor | None:
        made, width = self.tensors.expression(name), self.shapes[name][-1]
        return None if self.kind(name) in FLOATS else _order(self.source, made, width)

    @override
    def read(self, name: str) -> Tensor | QuantizedBlocks:
        self._used.add(name)
        return _made(self.source, self.tensors.expression(name), self.shapes[name])

    def check(self, reader: str) -> None:
        """Check that every tensor was used: without one it is another model. Raises ModelError."""
        unused = [name for name in self.shapes if name not in self._used]
        if unused:
            raise ModelError(
                f"the {reader} kernels leave {len(unused)} tensors of this model unused ({', '.join(unused[:5])})",
                'use kernels="reference", and report this model.',
            )


def _keeps_blocks(made: Expression, kind: str, is_ordered: bool = False) -> bool:
    """Whether an expression only selects rows, matrices and whole blocks of a kind.

    is_ordered: the blocks' columns have an order; then no columns are selected or moved.
    """
    if isinstance(made, str):
        return True
    divides = isinstance(made, Columns) and not _has_whole_blocks(made, kind)
    moves = is_ordered and isinstance(made, Columns | UntiledColumns)
    selects = isinstance(made, RowOperation | Stacked | Columns | UntiledColumns) and not divides and not moves
    return selects and _keeps_blocks(made.of, kind, is_ordered)


def _order(source: WeightSource, made: Expression, width: int) -> Tensor | None:
    """Return the order of the columns of blocks; see `WeightSource.order`."""
    if isinstance(made, str):
        return source.order(made)
    if isinstance(made, UntiledColumns) and not _divides_heads(made, source.kind(stored_name(made)), width):
        return _order_of(made, width)
    return _order(source, made.of, width)


def _has_whole_blocks(columns: Columns, kind: str) -> bool:
    layout = layout_of(kind)
    return (
        layout is not None
        and layout.divides
        and not any(each % layout.weights for each in (columns.first, columns.size))
    )


def _made(source: WeightSource, made: Expression, shape: tuple[int, ...]) -> Tensor | QuantizedBlocks:
    """Read a tensor of a shape as an expression says."""
    match made:
        case str():
            return source.read(made)
        case RowOperation():
            return take_rows(_made(source, made.of, made.stored_shape(shape)), made.rows(shape[0]))
        case Columns():
            return _take_columns(_made(source, made.of, made.stored_shape(shape)), made)
        case UntiledColumns():
            return _untile_columns(_made(source, made.of, shape), made)
        case Stacked(of=str()):
            return source.read_stacked(stored_name(made), made.index)
        case Stacked():
            return take_stacked(_made(source, made.of, made.stored_shape(shape)), made.index)
    return _computed(made, plain(_made(source, made.of, made.stored_shape(shape)), stored_name(made)))


def _computed(made: Operation, tensor: Tensor) -> Tensor:
    """Return the numbers that an operation makes of others."""
    match made:
        case Plus():
            return tensor.float() + made.number
        case LogOfNegative():
            if bool((tensor > 0).any()):
                raise ModelError(f"{stored_name(made)} has numbers above 0", "download the file again.")
            return logarithm(-tensor.double()).float()
        case Unsqueezed():
            return tensor.unsqueeze(1) if tensor.ndim == 2 else tensor
        case Flattened():
            return tensor.flatten()
    return tensor.t().contiguous()
