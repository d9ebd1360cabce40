"""Safetensors files in which several tensors are one matrix, as most quantised checkpoints have them.

    in the files                                      matrix of the model
    layers.0.mlp.up_proj.qweight, .scales, .qzeros    layers.0.mlp.up_proj.weight
    layers.0.mlp.down_proj.weight                     the same: modules may stay plain

A `Scheme` knows the tensors of a format. It is a module of the package `schemes`, named after config.json's
`quant_method`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from speculant import plugins
from speculant.errors import ModelError
from speculant.files import Stamp
from speculant.models.description import DecoderConfig
from speculant.models.sizes import tensor_shapes
from speculant.models.tensor_map import stored_name
from speculant.models.weights.formats import method_of, quantization_of
from speculant.models.weights.source import FLOATS, QuantizedBlocks
from speculant.models.weights.tensors import TensorEntry, TensorFiles

logger = logging.getLogger(__name__)

SCHEMES = "speculant.models.weights.schemes"
AGAIN = "download the checkpoint again."


@dataclass(frozen=True)
class ModuleParts:
    """The tensors that a matrix consists of, by the ends of their names after the name of the module.

    index: of a single matrix among stacked ones; None = all of them.
    """

    files: TensorFiles
    module: str
    index: int | None = None

    def has(self, end: str) -> bool:
        """Whether there is such a tensor."""
        return self.module + end in self.files.entries

    def shape(self, end: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if it is missing."""
        shape = self._entry(end).shape
        return shape if self.index is None else shape[1:]

    def kind(self, end: str) -> str:
        """Return safetensors' name of the type of a tensor, such as I32. Raises ModelError if it is missing."""
        return self._entry(end).kind

    def read(self, end: str) -> Tensor:
        """Read a tensor."""
        name = self.module + end
        return self.files.read(name) if self.index is None else self.files.read_stacked(name, self.index)

    def check(self, end: str, kinds: Collection[str], shape: Sequence[int]) -> None:
        """Raise ModelError unless a tensor exists and has one of these types and this shape."""
        if self.kind(end) not in kinds or self.shape(end) != tuple(shape):
            wanted = f"{' or '.join(sorted(kinds))} {list(shape)}"
            raise self.error(f"{self.module}{end} is {self.kind(end)} {list(self.shape(end))} instead of {wanted}")

    def error(self, problem: str, fix: str = AGAIN) -> ModelError:
        """Return the error of a matrix that can't be used."""
        return ModelError(f"{self.files.place}: {problem}", fix)

    def _entry(self, end: str) -> TensorEntry:
        if not self.has(end):
            raise self.error(f"{self.module}{end} is missing")
        return self.files.entries[self.module + end]


class StoredMatrix(Protocol):
    """A matrix [n, k] of several tensors, or stacked matrices, whose headers have been checked.

    Small tensors, such as zero points, may be read to find out the kind and the order.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, or of the stacked matrices."""
        ...

    @property
    def kind(self) -> str:
        """The layout of the blocks that `read` returns, in capitals; or a key of DECODED_BITS: it returns numbers."""
        ...

    @property
    def order(self) -> Tensor | None:
        """See `HasOrders.order`."""
        ...

    @property
    def why_decoded(self) -> str:
        """The reason why `read` returns numbers; "" if it returns blocks."""
        ...

    def read(self) -> Tensor | QuantizedBlocks:
        """Read it: blocks, or numbers in float32."""
        ...


class Scheme(Protocol):
    """A format of quantised weights.

    marks: the ends of the names of tensors that only a quantised matrix has. parts: the ends of all names of its
    tensors, other than a bias. weight: the end of the matrix's own name. unread: the ends of the names of tensors that
    are left out wherever they are, such as scales of activations.
    """

    marks: Sequence[str]
    parts: Sequence[str]
    weight: str
    unread: Sequence[str]

    def matrix(self, parts: ModuleParts) -> StoredMatrix:
        """Return a matrix. Raises ModelError for headers that do not fit each other."""
        ...


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a config.json; None = its weights are plain. Raises ModelError for options it can't read."""
    method = method_of(config)
    if method is None:
        return None
    scheme: Scheme = plugins.load(SCHEMES, method.replace("-", "_")).read_scheme(quantization_of(config))
    return scheme


@dataclass(frozen=True)
class ModuleFiles:
    """`StoredWeights` of files in which some matrices consist of several tensors.

    matrices: these, by name. unused: plain tensors that are left out.
    """

    files: TensorFiles
    scheme: Scheme
    matrices: Mapping[str, StoredMatrix]
    unused: frozenset[str] = frozenset()
    _last: dict[str, Tensor | QuantizedBlocks] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, files: TensorFiles, scheme: Scheme) -> ModuleFiles:
        """Find the matrices. Raises ModelError for headers that do not fit each other."""
        modules = {stored.removesuffix(mark) for mark in scheme.marks for stored in files.entries
                   if stored.endswith(mark)}  # fmt: skip
        parts = {module + scheme.weight: ModuleParts(files, module) for module in sorted(modules)}
        return cls(files, scheme, {name: scheme.matrix(each) for name, each in parts.items()})

    def _module(self, name: str) -> str:
        return name.removesuffix(self.scheme.weight)

    @cached_property
    def _plain(self) -> TensorFiles:
        """The files without the tensors of these matrices."""
        taken = {self._module(name) + end for name in self.matrices for end in self.scheme.parts} | self.unused
        return replace(self.files, entries={k: v for k, v in self.files.entries.items() if k not in taken})

    @property
    def described_by(self) -> str:
        """See `StoredWeights.described_by`."""
        return self.files.described_by

    @property
    def place(self) -> Path:
        """See `StoredWeights.place`."""
        return self.files.place

    def stamps(self) -> list[Stamp]:
        """See `StoredWeights.stamps`."""
        return self.files.stamps()

    def common_dtype(self) -> torch.dtype:
        """See `StoredWeights.common_dtype`."""
        return torch.bfloat16 if self.matrices else self.files.common_dtype()

    def quantised_kinds(self) -> list[str]:
        """See `StoredWeights.quantised_kinds`."""
        return sorted({matrix.kind for matrix in self.matrices.values()})

    def check_kinds(self) -> None:
        """See `StoredWeights.check_kinds`."""
        self._plain.check_kinds()

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return [*self._plain.names(), *self.matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.matrices[name].shape if name in self.matrices else self._plain.shape(name)

    def kind(self, name: str) -> str:
        """See `WeightSource.kind`."""
        return self.matrices[name].kind if name in self.matrices else self._plain.kind(name)

    def order(self, name: str) -> Tensor | None:
        """See `HasOrders.order`."""
        return self.matrices[name].order if name in self.matrices else None

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`.

        The last matrix is kept until the next read: parts of a fused one, such as Phi-3's qkv_proj, are read in turn.
        """
        found = self._last.get(name)
        if found is None:
            self._last.clear()  # before the next one takes memory
            if name not in self.matrices:
                return self._plain.read(name)
            found = self._last[name] = self.matrices[name].read()
        return found

    def read_stacked(self, name: str, index: int) -> Tensor | QuantizedBlocks:
        """See `ReadsStacks.read_stacked`."""
        self._last.clear()
        if name not in self.matrices:
            return self._plain.read_stacked(name, index)
        return self.scheme.matrix(ModuleParts(self.files, self._module(name), index)).read()

    def say_decoded(self) -> None:
        """Warn of matrices that are decoded, with the reasons."""
        reasons = defaultdict[str, list[str]](list)
        for name, matrix in self.matrices.items():
            if matrix.why_decoded:
                reasons[matrix.why_decoded].append(name)
        if reasons:
            listed = "; ".join(f"{len(names)} ({names[0]} ...), because {why}" for why, names in reasons.items())
            logger.warning("%s: some matrices are decoded to floating-point numbers: %s", self.place.name, listed)


def open_modules(files: TensorFiles, scheme: Scheme, decoder: DecoderConfig) -> tuple[ModuleFiles, DecoderConfig]:
    """Return the weights of a quantised model, and its description for these files.

    Quantised matrices are [n, k], even if the family's plain matrices are transposed. Some programs store a bias of
    zeros for each module; it is left out where the model has no bias. Raises ModelError.
    """
    found = ModuleFiles.of(files, scheme)
    decoder = replace(decoder, tensors=decoder.tensors.upright(found.matrices))
    known = {stored_name(decoder.tensors.expression(name)) for name in tensor_shapes(decoder)}
    biases = {name.removesuffix(scheme.weight) + ".bias" for name in found.matrices} & files.entries.keys() - known
    zeros = {name for name in biases if files.kind(name) in FLOATS and not bool(files.read(name).any())}
    unread = {name for name in files.entries if name.endswith(tuple(scheme.unread))}
    found = replace(found, unused=frozenset(zeros | unread))
    found.say_decoded()
    return found, decoder
