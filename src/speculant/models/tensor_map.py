"""Where a checkpoint's files hold a model's tensors, and how each is made from what is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)  # of a layer or an expert

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor that holds several tensors: of each `period` rows, `size` from `first` on."""

    name: str
    first: int
    size: int
    period: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the stored tensor's shape, from the model tensor's."""
        return (shape[0] // self.size * self.period, *shape[1:])

    def rows(self, count: int) -> Sequence[int]:
        """Return the index of the stored row for each of the model tensor's `count` rows."""
        periods = np.arange(count // self.size)[:, None] * self.period
        return (periods + self.first + np.arange(self.size)).ravel().tolist()


@dataclass(frozen=True)
class Unpaired:
    """A stored tensor of `heads` heads, in which two rows that rotate together are neighbours.

    In the model, the first row of each pair is in the first half of its head, and the second row in the other half.
    part: the rows of these heads, if the stored tensor has others too.
    """

    name: str
    heads: int
    part: Rows | None = None

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the stored tensor's shape, from the model tensor's."""
        return self.part.stored_shape(shape) if self.part else shape

    def rows(self, count: int) -> Sequence[int]:
        """Return the index of the stored row for each of the model tensor's `count` rows."""
        stored = np.asarray(self.part.rows(count) if self.part else np.arange(count))
        return stored.reshape(self.heads, -1, 2).swapaxes(1, 2).ravel().tolist()


@dataclass(frozen=True)
class Transposed:
    """A stored matrix whose columns are the model's rows. part: those that it consists of; None = all."""

    name: str
    part: Rows | None = None

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the stored tensor's shape, from the model tensor's."""
        return (self.part.stored_shape(shape) if self.part else shape)[::-1]


@dataclass(frozen=True)
class Plus:
    """A stored tensor to which a number is added."""

    name: str
    number: float

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the stored tensor's shape, from the model tensor's."""
        return shape


# How a model's tensor is made: the name of a stored tensor, which is taken as it is, or an operation on one.
Operation = Unpaired | Rows | Transposed | Plus
Expression = str | Operation


@dataclass(frozen=True)
class TensorMap:
    """Where the files hold a model's tensors.

    names: pairs of a tensor of the model (see `models/sizes.py`) and the expression for it, for those that are not
    stored under the model's own names; {} stands for a number, such as that of a layer. prefix: begins the stored names
    of all tensors.
    """

    names: tuple[tuple[str, Expression], ...] = ()
    prefix: str = ""

    @cached_property
    def _made(self) -> dict[str, Expression]:
        return dict(self.names)

    def expression(self, name: str) -> Expression:
        """Return how a tensor is made."""
        numbers = _NUMBER.findall(name)
        made = self._made.get(name) or self._made.get(_NUMBER.sub("{}", name), name)
        if isinstance(made, str):
            return self.prefix + made.format(*numbers)
        return replace(made, name=self.prefix + made.name.format(*numbers))

    def stored(self, name: str) -> str:
        """Return the files' name of a tensor."""
        made = self.expression(name)
        return made if isinstance(made, str) else made.name

    def stored_shape(self, name: str, shape: Shape) -> Shape:
        """Return the shape of the stored tensor that a tensor of a shape is made from."""
        made = self.expression(name)
        return shape if isinstance(made, str) else made.stored_shape(shape)


SAME_NAMES = TensorMap()
