"""Where a model's tensors come from, one at a time: nothing is read before it is asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from speculant.errors import ModelError


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix that is stored as blocks of small integers with scales, as GGUF and GPTQ files have them.

    shape is the matrix's, [n, k]. `blocks` holds the bytes in the order that `layout` names, such as "q4_0".
    """

    layout: str
    shape: tuple[int, ...]
    blocks: Tensor


class WeightSource(Protocol):
    """Tensors by name. A tensor that was read belongs to the reader, who drops it before the next one is read."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        ...

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """Read a tensor in the type it is stored in."""
        ...


def read_plain(weights: WeightSource, name: str) -> Tensor:
    """Read a tensor of floating-point numbers. Raises ModelError for one in blocks, which nothing here unpacks."""
    tensor = weights.read(name)
    if isinstance(tensor, QuantizedBlocks):
        raise ModelError(
            f"{name} is stored in blocks of the layout {tensor.layout!r}, which is not supported yet",
            "use the unquantised checkpoint it came from.",
        )
    return tensor


class ModuleWeights:
    """The parameters of a module that is in memory already; one that two layers share has the first one's name."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self._parameters.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return tuple(self._parameters[name].shape)

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`."""
        return self._parameters[name].detach()


class CheckedWeights:
    """The tensors of a source that a model is made of, which must all be read."""

    def __init__(self, source: WeightSource, names: Collection[str]) -> None:
        self._source, self._names = source, names
        self._unread = dict.fromkeys(names)

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self._source.shape(name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        self._unread.pop(name, None)
        return self._source.read(name)

    def check(self, reader: str) -> None:
        """Raise ModelError if the reader left a tensor out: what it computes is another model then."""
        if self._unread:
            raise ModelError(
                f"the {reader} kernels leave {len(self._unread)} tensors of this model unused"
                f" ({', '.join(list(self._unread)[:5])})",
                'use kernels="reference", and report this model.',
            )
