"""Where a checkpoint's files hold a model's tensors, and how each is made from what is stored.

An `Expression` is the name of a stored tensor, or an operation on an expression, as in Rows(Transposed("c_attn"), ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)  # of a layer or an expert
_KINDS = ("weight", "bias")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unpaired:
    """A stored tensor of `heads` heads, in which two rows that rotate together are neighbours.

    In the model, the first row of each pair is in the first half of its head, and the second row in the other half.
    """

    of: Expression
    heads: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return shape

    def rows(self, count: int) -> list[int]:
        """Return the index of the stored row for each of the model tensor's `count` rows."""
        found: list[int] = np.arange(count).reshape(self.heads, -1, 2).swapaxes(1, 2).ravel().tolist()
        return found


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor that holds several tensors: of each `period` rows, `size` from `first` on."""

    of: Expression
    first: int
    size: int
    period: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return (shape[0] // self.size * self.period, *shape[1:])

    def rows(self, count: int) -> list[int]:
        """Return the index of the stored row for each of the model tensor's `count` rows."""
        periods = np.arange(count // self.size)[:, None] * self.period
        found: list[int] = (periods + self.first + np.arange(self.size)).ravel().tolist()
        return found


@dataclass(frozen=True)
class Transposed:
    """A stored matrix whose columns are the model's rows. A vector stays as it is."""

    of: Expression

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return shape[::-1]


@dataclass(frozen=True)
class Plus:
    """A stored tensor to which a number is added."""

    of: Expression
    number: float

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return shape


@dataclass(frozen=True)
class Columns:
    """Columns of a stored matrix of `width` columns: `size` of them, from `first` on."""

    of: Expression
    first: int
    size: int
    width: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return (*shape[:-1], self.width)


@dataclass(frozen=True)
class Stacked:
    """One of the `count` tensors that a stored tensor consists of, one for each index of its first dimension.

    index: which one it is. A `TensorMap` sets it to the last number in the name of the model's tensor, if it has one.
    """

    of: Expression
    count: int
    index: int = 0

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return (self.count, *shape)


# How a model's tensor is made: the name of a stored tensor, which is taken as it is, or an operation.
Operation = Unpaired | Rows | Columns | Transposed | Plus | Stacked
Expression = str | Operation


def stored_name(made: Expression) -> str:
    """Return the name of the stored tensor that an expression reads."""
    return made if isinstance(made, str) else stored_name(made.of)


def with_name(made: Expression, rename: Callable[[str], str]) -> Expression:
    """Return an expression that reads a tensor of another name."""
    return rename(made) if isinstance(made, str) else replace(made, of=with_name(made.of, rename))


def stored_shape(made: Expression, shape: Shape) -> Shape:
    """Return the shape of the stored tensor that an expression reads, from the shape of its result."""
    return shape if isinstance(made, str) else stored_shape(made.of, made.stored_shape(shape))


def _numbered(made: Expression, numbers: Sequence[str]) -> Expression:
    """Return an expression whose stacks have the last of these numbers as their index."""
    if isinstance(made, str):
        return made
    inner = replace(made, of=_numbered(made.of, numbers))
    return replace(inner, index=int(numbers[-1])) if isinstance(inner, Stacked) and numbers else inner


def _upright(made: Expression) -> Expression:
    """Return an expression without transpositions."""
    if isinstance(made, str):
        return made
    return _upright(made.of) if isinstance(made, Transposed) else replace(made, of=_upright(made.of))


@dataclass(frozen=True)
class TensorMap:
    """Where the files hold a model's tensors.

    names: pairs of a tensor of the model (see `models/sizes.py`) and the expression for it, for those that are not
    stored under the model's own names; {} stands for a number, such as that of a layer. An entry for one layer takes
    precedence over one for all. unused: tensors that the files may have and the model lacks. copies: pairs of a stored
    tensor and of one with the same numbers, which files may have too, or instead. upright_names: stored matrices that
    are not transposed, whatever expressions say.
    """

    names: tuple[tuple[str, Expression], ...] = ()
    unused: frozenset[str] = frozenset()
    copies: tuple[tuple[str, str], ...] = ()
    upright_names: tuple[str, ...] = ()

    @cached_property
    def _made(self) -> dict[str, Expression]:
        return dict(self.names)

    def expression(self, name: str) -> Expression:
        """Return how a tensor is made."""
        numbers = _NUMBER.findall(name)
        made = self._made.get(name) or self._made.get(_NUMBER.sub("{}", name), name)
        made = _numbered(with_name(made, lambda stored: stored.format(*numbers)), numbers)
        return _upright(made) if stored_name(made) in self.upright_names else made

    def upright(self, stored: Collection[str]) -> TensorMap:
        """Return the map for files in which these stored matrices are not transposed."""
        return replace(self, upright_names=tuple(sorted(stored)) if self._has_transposed else ())

    @property
    def _has_transposed(self) -> bool:
        return any(_upright(made) != made for _, made in self.names)

    def stored(self, name: str) -> str:
        """Return the files' name of a tensor."""
        return stored_name(self.expression(name))


SAME_NAMES = TensorMap()


def map_modules(
    own: str, stored: str, layer: Mapping[str, Expression], outside: Mapping[str, Expression] = MappingProxyType({})
) -> TensorMap:
    """Return the map for modules, each with a weight and perhaps a bias, that are stored under other names.

    own, stored: the beginning of the names of a layer's tensors, in the model and in the files, such as
    "model.layers.{}.". layer: expressions for the modules of a layer; outside: for modules outside of layers.
    """
    pairs = [(own + name, with_name(made, lambda part: stored + part)) for name, made in layer.items()]
    pairs += outside.items()
    return TensorMap(tuple(
        (f"{name}.{kind}", with_name(made, lambda module, kind=kind: f"{module}.{kind}"))  # type: ignore[misc]
        for name, made in pairs for kind in _KINDS
    ))  # fmt: skip
