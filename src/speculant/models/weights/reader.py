"""Reads a decoder's tensors for the native kernels. Each one is packed before the next is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels.memory import Arena
from speculant.kernels.native import BLOCK_TYPES, TYPES, Kernels, Type, Weight
from speculant.kernels.packing import Packer
from speculant.models.weights.cache import WeightStore
from speculant.models.weights.rounding import ROUNDINGS, Rounding
from speculant.models.weights.source import QuantizedBlocks, WeightSource, decode, has_blocks, read_plain

KINDS = {
    "F64": Type.F32, "F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16,
    **{layout.upper(): type_ for layout, type_ in BLOCK_TYPES.items()},
}  # fmt: skip
_ROUNDED_TO = {Type.BF16: torch.bfloat16, Type.BF12: torch.bfloat16}  # before packing; other floats to float32


@dataclass(frozen=True)
class WeightTypes:
    """The type in which the kernels store each matrix of a source, unless all matrices are rounded to another one.

    In a source with blocks, each matrix keeps its type, and vectors stay float32. Kinds that the kernels can't multiply
    by become bfloat16. Matrices of other sources are rounded to `dtype`, float32 or bfloat16; but float16 stays float16
    if `dtype` is float32, because the kernels compute the same bits from both.

    coded: bfloat16 matrices are stored in 12 bits a weight.
    """

    source: WeightSource
    dtype: torch.dtype
    coded: bool = False

    @cached_property
    def as_stored(self) -> bool:
        """Whether each tensor keeps the type that it is stored in."""
        return has_blocks(self.source)

    @property
    def vectors(self) -> torch.dtype:
        """The type that norms and biases are rounded to."""
        return torch.float32 if self.as_stored else self.dtype

    def of(self, name: str) -> Type:
        """Return the type of a matrix."""
        kind = self.source.kind(name)
        if self.as_stored:
            type_ = KINDS.get(kind, Type.BF16)
        else:
            type_ = Type.F16 if kind == "F16" and self.dtype == torch.float32 else TYPES[self.dtype]
        return Type.BF12 if self.coded and type_ == Type.BF16 else type_


@dataclass(frozen=True)
class WeightReader:
    """A source whose tensors are packed; names follow `prefix`.

    types: of its matrices. rounded: the types that they are rounded to instead; None = they are not rounded.
    store: where packed matrices are looked up and kept.
    """

    types: WeightTypes
    kernels: Kernels
    arena: Arena
    prefix: str = ""
    rounded: Rounding | None = None
    store: WeightStore | None = None

    @property
    def source(self) -> WeightSource:
        """The source of the tensors."""
        return self.types.source

    def inside(self, part: str) -> WeightReader:
        """Return a reader of a submodule."""
        return replace(self, prefix=self.prefix + part)

    def unrounded(self) -> WeightReader:
        """Return a reader that does not round matrices."""
        return replace(self, rounded=None)

    def matrix(self, *names: str) -> Weight:
        """Pack matrices of the same type and depth k, concatenated along their rows.

        Raises ModelError; see `_read_matrix`.
        """
        shapes = [self.source.shape(self.prefix + name) for name in names]
        return self._pack(self._type_of(names[0]), sum(n for n, _ in shapes), shapes[0][1], [names])

    def matrices(self, *names: str) -> tuple[Weight, ...]:
        """Pack matrices of the same depth k in order; neighbours of the same type become one. See `matrix`."""
        return tuple(self.matrix(*group) for _, group in groupby(names, self._type_of))

    def interleaved(self, *names: str) -> tuple[Weight, ...]:
        """Pack matrices of one shape, interleaved panel by panel, or one by one if their types differ. See `matrix`."""
        if len(types := set(map(self._type_of, names))) > 1:
            return tuple(map(self.matrix, names))
        ((n, k),) = {self.source.shape(self.prefix + name) for name in names}
        return (self._pack(types.pop(), n, k, [(name,) for name in names]),)

    def vector(self, *names: str) -> Tensor:
        """Return vectors in float32, concatenated."""
        return torch.cat([self._read_plain(name).to(self.types.vectors, copy=True) for name in names]).float()

    def _type_of(self, name: str) -> Type:
        whole = self.prefix + name
        return self.types.of(whole) if self.rounded is None else self.rounded.type_of(whole, self.source.shape(whole)[-1])

    def _pack(self, stored: Type, n: int, k: int, lanes: Sequence[Sequence[str]]) -> Weight:
        name = f"{self.prefix}{'|'.join(map('+'.join, lanes))} {stored.name}"
        found = self.store.get(name, stored, n, k) if self.store else None
        if found is not None:
            return found
        reads = [[partial(self._read_matrix, stored, name) for name in lane] for lane in lanes]
        dtype = self.types.dtype if self.rounded is not None else _ROUNDED_TO.get(stored, torch.float32)
        packed = Packer(self.kernels, dtype, self.arena).pack(stored, n, k, reads)
        return self.store.add(name, packed) if self.store else packed

    def _read_matrix(self, type_: Type, name: str) -> Tensor:
        """Read a matrix: its blocks if they are packed as `type_`, else floating-point numbers.

        Raises ModelError for a matrix that is to be rounded to integers and is not finite.
        """
        if self.rounded is None:
            return self._as_stored(self.source.read(self.prefix + name), type_)
        matrix = self._read_plain(name)
        require_finite(matrix, self.prefix + name, self.types.dtype, self.rounded)
        return matrix

    def _as_stored(self, matrix: Tensor | QuantizedBlocks, type_: Type) -> Tensor:
        if not isinstance(matrix, QuantizedBlocks):
            return matrix
        return matrix.blocks if BLOCK_TYPES.get(matrix.layout) == type_ else decode(matrix, torch.bfloat16)

    def _read_plain(self, name: str) -> Tensor:
        return read_plain(self.source, self.prefix + name)


def require_finite(matrix: Tensor, name: str, dtype: torch.dtype, rounding: Rounding) -> None:
    """Raise ModelError for a matrix that can't be rounded to integers because it is not finite in `dtype`."""
    if not _is_finite(matrix, dtype):
        raise ModelError(
            f"{name} has weights that are NaN or infinite in"
            f" {str(dtype).removeprefix('torch.')} and can't be rounded to {_named(rounding)}",
            "download the checkpoint again, or load it without quantization to look at it.",
        )


def _named(rounding: Rounding) -> str:
    """Return the user's name of the types that weights are rounded to."""
    return next(name for name, each in ROUNDINGS.items() if each == rounding)


def _is_finite(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers of a matrix are finite in `dtype`; rounding keeps their order, so the extremes decide."""
    return all(bool(extreme.to(dtype).isfinite()) for extreme in matrix.aminmax())
