"""Reads a decoder's tensors for the native kernels. Each one is packed before the next is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels.memory import Arena
from speculant.kernels.native import QUANTIZED, Kernels, Type, Weight
from speculant.kernels.packing import Packer
from speculant.models.weights.cache import WeightStore
from speculant.models.weights.source import WeightSource, read_plain


@dataclass(frozen=True)
class WeightReader:
    """A source whose tensors are rounded to `dtype` and packed; names follow `prefix`.

    coded: matrices of bfloat16 are stored in 12 bits a weight. store: where packed matrices are found and added.
    """

    weights: WeightSource
    kernels: Kernels
    dtype: torch.dtype
    arena: Arena
    prefix: str = ""
    coded: bool = False
    store: WeightStore | None = None

    def inside(self, part: str) -> WeightReader:
        """Return a reader of a submodule."""
        return replace(self, prefix=self.prefix + part)

    def matrix(self, type_: Type, *names: str) -> Weight:
        """Pack matrices of the same depth k, concatenated along their rows. Raises ModelError; see `_read_matrix`."""
        shapes = [self.weights.shape(self.prefix + name) for name in names]
        return self._pack(type_, sum(n for n, _ in shapes), shapes[0][1], [names])

    def interleaved(self, type_: Type, *names: str) -> Weight:
        """Pack matrices of the same shape, interleaved panel by panel. Raises ModelError; see `_read_matrix`."""
        ((n, k),) = {self.weights.shape(self.prefix + name) for name in names}
        return self._pack(type_, n, k, [(name,) for name in names])

    def _pack(self, type_: Type, n: int, k: int, lanes: Sequence[Sequence[str]]) -> Weight:
        stored = Type.BF12 if self.coded and type_ == Type.BF16 else type_
        name = f"{self.prefix}{'|'.join(map('+'.join, lanes))} {stored.name}"
        found = self.store.get(name, stored, n, k) if self.store else None
        if found is not None:
            return found
        reads = [[partial(self._read_matrix, type_, name) for name in lane] for lane in lanes]
        packed = Packer(self.kernels, self.dtype, self.arena).pack(stored, n, k, reads)
        return self.store.add(name, packed) if self.store else packed

    def vector(self, *names: str) -> Tensor:
        """Return vectors in float32, concatenated."""
        return torch.cat([self._read(name).to(self.dtype, copy=True) for name in names]).float()

    def _read_matrix(self, type_: Type, name: str) -> Tensor:
        """Read a matrix. Raises ModelError if it is to be quantised and not finite: quantised weights are finite."""
        matrix = self._read(name)
        if type_ in QUANTIZED.values() and not _is_finite(matrix, self.dtype):
            raise ModelError(
                f"{self.prefix + name} has weights that are NaN or infinite in {str(self.dtype).removeprefix('torch.')}"
                f" and can't be rounded to {type_.name.lower()}",
                "download the checkpoint again, or load it without quantization to look at it.",
            )
        return matrix

    def _read(self, name: str) -> Tensor:
        return read_plain(self.weights, self.prefix + name)


def _is_finite(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers of a matrix are finite in `dtype`; rounding keeps their order, so the extremes decide."""
    return all(bool(extreme.to(dtype).isfinite()) for extreme in matrix.aminmax())
