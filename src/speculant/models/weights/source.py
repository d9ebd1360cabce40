"""Sources of a model's tensors. A tensor is read only when it is requested."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from speculant.errors import ModelError
from speculant.models.sizes import HEAD


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix that is stored as blocks of small integers with scales, as GGUF and GPTQ files have them.

    shape is the matrix's, [n, k]. `blocks` holds the bytes in the order that `layout` names, such as "q4_0".
    """

    layout: str
    shape: tuple[int, ...]
    blocks: Tensor


class WeightSource(Protocol):
    """Tensors by name. The caller owns a tensor that was read, and drops it before it reads the next one."""

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
    """Read a tensor of floating-point numbers. Raises ModelError for quantised blocks, which are not supported yet."""
    tensor = weights.read(name)
    if isinstance(tensor, QuantizedBlocks):
        raise ModelError(
            f"{name} is stored in blocks of the layout {tensor.layout!r}, which is not supported yet",
            "use the unquantised checkpoint it came from.",
        )
    return tensor


class ModuleWeights:
    """The parameters of a module in memory; a parameter that two layers share has the name of the first."""

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


@dataclass(frozen=True)
class Mapped:
    """A source whose tensors have the model's names. stored: the source's name of each."""

    source: WeightSource
    stored: Mapping[str, str]

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.source.shape(self.stored[name])

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        return self.source.read(self.stored[name])


@dataclass(frozen=True)
class ShortHead:
    """A source whose output head has the rows of some tokens only.

    whole: the name of the whole head, which is the embedding's where they are tied.
    """

    source: WeightSource
    tokens: tuple[int, ...]
    whole: str

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return {**dict.fromkeys(self.source.names()), HEAD: None}.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return (len(self.tokens), *self.source.shape(self.whole)[1:]) if name == HEAD else self.source.shape(name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        return read_plain(self.source, self.whole)[list(self.tokens)] if name == HEAD else self.source.read(name)


class CheckedWeights:
    """The tensors of a source that a model consists of.

    `check` requires that each was read, or that its shape was compared with that of a packed one.
    """

    def __init__(self, source: WeightSource, names: Collection[str]) -> None:
        self._source, self._names = source, names
        self._unused = dict.fromkeys(names)

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        self._unused.pop(name, None)
        return self._source.shape(name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        self._unused.pop(name, None)
        return self._source.read(name)

    def check(self, reader: str) -> None:
        """Check that every tensor was used: without one it is another model. Raises ModelError."""
        if self._unused:
            raise ModelError(
                f"the {reader} kernels leave {len(self._unused)} tensors of this model unused"
                f" ({', '.join(list(self._unused)[:5])})",
                'use kernels="reference", and report this model.',
            )
