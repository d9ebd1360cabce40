"""Reads a decoder's tensors for the native kernels. Each one is packed before the next is read.

Matrices may be rounded, to types by their roles. Least squares choose the scales (csrc/rounding.h). int4 keeps more
bits where errors cost most: in the embedding, the head and the values, and in matrices whose results are added to the
residual stream. Rows whose length is not a multiple of 256 have types with blocks of 32, which have more bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels import BLOCK_SIZES, BLOCK_TYPES, TYPES, Arena, Kernels, Packer, Type, Weight, likely_bytes
from speculant.models.weights.cache import WeightStore, say_once
from speculant.models.weights.source import QuantizedBlocks, WeightSource, decode, has_blocks, plain, read_plain

ROUNDED = (
    Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.ZERO4, Type.ZERO8,
)  # fmt: skip
"""The types that csrc/rounding.h rounds to."""
_UNDIVIDED = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


@dataclass(frozen=True)
class Rounding:
    """The type of most matrices, and those of matrices with a certain part in their name.

    undivided: the types in place of those whose blocks do not fill the rows.
    """

    most: Type
    roles: Mapping[str, Type] = field(default_factory=dict)
    undivided: Mapping[Type, Type] = field(default_factory=lambda: _UNDIVIDED)

    def type_of(self, name: str, k: int) -> Type:
        """Return the type of a matrix [n, k]. name: as in `tensor_shapes`; "" = a matrix without a role."""
        type_ = next((type_ for part, type_ in self.roles.items() if part in name.split(".")), self.most)
        return type_ if k % BLOCK_SIZES[type_][0] == 0 else self.undivided.get(type_, type_)


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(Type.Q8_0),
    "int4": Rounding(
        Type.Q4_K,
        {
            **dict.fromkeys(("embed_tokens", "lm_head", "v_proj"), Type.Q6_K),
            **dict.fromkeys(("o_proj", "down_proj"), Type.Q5_K),
        },
    ),
}
# Of drafts, whose speed counts more than their text: about as many tokens are accepted, and all weights have 4.5 bits.
DRAFT_ROUNDINGS = {**ROUNDINGS, "int4": Rounding(Type.Q4_K, undivided={Type.Q4_K: Type.Q4_0})}


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

    @cached_property
    def has_integers(self) -> bool:
        """Whether the kernels multiply any matrix as integers."""
        floats = {Type.F32, Type.F16, Type.BF16, Type.FP8}
        return any(KINDS.get(self.source.kind(name), Type.BF16) not in floats for name in self.source.names())

    @property
    def vectors(self) -> torch.dtype:
        """The type that norms and biases are rounded to."""
        return torch.float32 if self.as_stored else self.dtype

    @property
    def decoded(self) -> Type:
        """The type of matrices whose blocks are decoded."""
        return Type.BF12 if self.coded else Type.BF16

    @property
    def common(self) -> Type:
        """The type of matrices that need one type and are stored in several."""
        return self.decoded if self.as_stored else TYPES[self.dtype]

    def have_orders(self, names: Iterable[str]) -> bool:
        """Whether the inputs of any of these matrices have an order."""
        return any(self.source.order(name) is not None for name in names)

    def mixed(self, groups: Iterable[Iterable[str]]) -> set[Type]:
        """Return the types of the first group of matrices that has several; empty if each group has one."""
        return next((types for group in groups if len(types := set(map(self.of, group))) > 1), set())

    def of(self, name: str) -> Type:
        """Return the type of a matrix."""
        kind = self.source.kind(name)
        if self.as_stored:
            type_ = KINDS.get(kind, Type.BF16)
        else:
            type_ = Type.F16 if kind == "F16" and self.dtype == torch.float32 else TYPES[self.dtype]
        return self.decoded if type_ == Type.BF16 else type_


@dataclass(frozen=True)
class WeightReader:
    """A source whose tensors are packed; names follow `prefix`.

    types: of its matrices. rounded: the types that they are rounded to instead; None = they are not rounded.
    store: where packed matrices are looked up and kept. one_type: the type of all matrices that are not rounded; None =
    each has its own. alike: whether matrices of floats are summed alike on all instruction sets.
    """

    types: WeightTypes
    kernels: Kernels
    arena: Arena
    prefix: str = ""
    rounded: Rounding | None = None
    store: WeightStore | None = None
    one_type: Type | None = None
    alike: bool = False

    @property
    def source(self) -> WeightSource:
        """The source of the tensors."""
        return self.types.source

    def inside(self, part: str) -> WeightReader:
        """Return a reader of a submodule."""
        return replace(self, prefix=self.prefix + part)

    def unrounded(self) -> WeightReader:
        """Return a reader that does not round matrices."""
        return replace(self.deciding(), rounded=None)

    def deciding(self) -> WeightReader:
        """Return a reader of the head or of routers, whose floats are summed alike if the model has integers too."""
        return replace(self, alike=self.rounded is not None or self.types.has_integers)

    def decoding_ordered(self, *names: str) -> WeightReader:
        """Return a reader for uses without an order of inputs: it decodes all matrices if one of these has one."""
        if self.rounded is not None or not self.types.have_orders(self.prefix + name for name in names):
            return self
        say_once("experts or the embedding are decoded to bfloat16, because act-order sorts their inputs")
        return replace(self, one_type=self.types.common)

    def unified(self, *groups: Sequence[str]) -> WeightReader:
        """Return a reader of matrices that are used together: those of a group have one type, and none has an order.

        Where they are stored otherwise, it decodes all of them.
        """
        found = self.decoding_ordered(*chain(*groups))
        whole = [[self.prefix + name for name in group] for group in groups]
        types = self.types.mixed(whole) if found is self and self.rounded is None else ()
        if not types:
            return found
        self._say_mixed(types, list(chain(*whole)))
        return replace(self, one_type=self.types.common)

    def _say_mixed(self, types: Iterable[Type], names: Sequence[str]) -> None:
        shapes, common = {name: self.source.shape(name) for name in names}, self.types.common
        before = sum(likely_bytes(self.kernels, self.types.of(name), *shape) for name, shape in shapes.items())
        after = sum(likely_bytes(self.kernels, common, *shape) for shape in shapes.values())
        say_once(
            f"all experts of {self.prefix.removesuffix('.')} are kept in"
            f" {str(_ROUNDED_TO.get(common, torch.float32)).removeprefix('torch.')}, because some are stored in"
            f" another type than others ({', '.join(sorted(type_.name.lower() for type_ in types))}): they take"
            f" {after / 2**20:.1f} MiB instead of {before / 2**20:.1f}"
        )

    def matrix(self, *names: str) -> Weight:
        """Pack matrices of the same type, order and depth k, concatenated along their rows.

        Raises ModelError; see `_read_matrix`.
        """
        shapes = [self.source.shape(self.prefix + name) for name in names]
        return self._pack(sum(n for n, _ in shapes), shapes[0][1], [names])

    def matrices(self, *names: str) -> tuple[Weight, ...]:
        """Pack matrices of the same depth k in order; neighbours of the same type and order become one.

        See `matrix`.
        """
        return tuple(self.matrix(*group) for _, group in groupby(names, self._form_of))

    def interleaved(self, *names: str) -> tuple[Weight, ...]:
        """Pack matrices of one shape, interleaved panel by panel, or one by one if types or orders differ.

        See `matrix`.
        """
        if len(set(map(self._form_of, names))) > 1:
            return tuple(map(self.matrix, names))
        ((n, k),) = {self.source.shape(self.prefix + name) for name in names}
        return (self._pack(n, k, [(name,) for name in names]),)

    def vector(self, *names: str) -> Tensor:
        """Return vectors in float32, concatenated."""
        return torch.cat([self._read_plain(name).to(self.types.vectors, copy=True) for name in names]).float()

    def _type_of(self, name: str) -> Type:
        whole = self.prefix + name
        if self.rounded is not None:
            return self.rounded.type_of(whole, self.source.shape(whole)[-1])
        return self.types.of(whole) if self.one_type is None else self.one_type

    def _order_of(self, name: str) -> Tensor | None:
        """Return the order of the inputs of a matrix whose blocks are packed."""
        if self.rounded is not None or self._type_of(name) not in BLOCK_TYPES.values():
            return None
        return self.source.order(self.prefix + name)

    def _form_of(self, name: str) -> tuple[Type, bytes]:
        """Return the type and the order of a matrix; matrices with the same ones can be packed together."""
        order = self._order_of(name)
        return self._type_of(name), b"" if order is None else order.numpy().tobytes()

    def _pack(self, n: int, k: int, lanes: Sequence[Sequence[str]]) -> Weight:
        stored, order = self._type_of(lanes[0][0]), self._order_of(lanes[0][0])
        name = f"{self.prefix}{'|'.join(map('+'.join, lanes))} {stored.name}"
        found = self.store.get(name, stored, n, k) if self.store else None
        if found is not None:
            return replace(found, order=order, alike=self.alike)
        reads = [[partial(self._read_matrix, stored, name) for name in lane] for lane in lanes]
        dtype = self.types.dtype if self.rounded is not None else _ROUNDED_TO.get(stored, torch.float32)
        packed = Packer(self.kernels, dtype, self.arena).pack(stored, n, k, reads)
        packed = self.store.add(name, packed) if self.store else packed
        return replace(packed, order=order, alike=self.alike)

    def _read_matrix(self, type_: Type, name: str) -> Tensor:
        """Read a matrix: its blocks if they are packed as `type_`, else floating-point numbers.

        Raises ModelError for a matrix that is to be rounded to integers and is not finite.
        """
        if self.rounded is None:
            return self._as_stored(name, self.source.read(self.prefix + name), type_)
        matrix = self._numbers(self.source.read(self.prefix + name), self.prefix + name)
        require_finite(matrix, self.prefix + name, self.types.dtype, self.rounded)
        return matrix

    def _numbers(self, matrix: Tensor | QuantizedBlocks, name: str) -> Tensor:
        """Return the numbers of a matrix that is to be rounded, until the next call. The kernels decode blocks."""
        if not isinstance(matrix, QuantizedBlocks) or matrix.order is not None:
            return plain(matrix, name)
        type_, dtype, (n, k) = BLOCK_TYPES.get(matrix.layout), self.types.dtype, matrix.shape
        if type_ not in BLOCK_SIZES:
            return plain(matrix, name)
        out = self.arena.scratch(n * k * dtype.itemsize).view(dtype).view(n, k)
        self.kernels.decode(type_, matrix.blocks, out)
        return out

    def _as_stored(self, name: str, matrix: Tensor | QuantizedBlocks, type_: Type) -> Tensor:
        if not isinstance(matrix, QuantizedBlocks):
            return matrix
        if BLOCK_TYPES.get(matrix.layout) != type_:
            return decode(matrix, torch.bfloat16)
        assert (matrix.order is None) == (self._order_of(name) is None), "a source hides the order of its columns"
        return matrix.blocks

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
    return next(name for of in (ROUNDINGS, DRAFT_ROUNDINGS) for name, each in of.items() if each == rounding)


def _is_finite(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers of a matrix are finite in `dtype`; rounding keeps their order, so the extremes decide."""
    return all(bool(extreme.to(dtype).isfinite()) for extreme in matrix.aminmax())
