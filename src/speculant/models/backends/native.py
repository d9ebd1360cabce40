"""The native kernels on the CPU: a row's result depends only on that row and its context, bit for bit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from speculant.kernels import BLOCK_TYPES, TYPES, Kernels, NativeSampler, Sampler, Type, open_kernels
from speculant.models.backends.base import (
    AS_THEY_ARE,
    CODED,
    PLAIN,
    Packing,
    PacksWeights,
    RoundsWeights,
    StoresWeights,
    TimesWeights,
)
from speculant.models.description import DecoderConfig
from speculant.models.native.decoder import NativeDecoder
from speculant.models.native.program import scratch_bytes
from speculant.models.native.speeds import fastest_packing, row_seconds
from speculant.models.sizes import activations
from speculant.models.weights.cache import WeightCache, WeightStore
from speculant.models.weights.reader import DRAFT_ROUNDINGS, ROUNDINGS, Rounding
from speculant.models.weights.source import QuantizedBlocks, WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NativeBackend(PacksWeights, RoundsWeights, TimesWeights, StoresWeights):
    """See `Backend`. kernels None = they were not built, and the backend can compute no model.

    roundings: of `quantizations`.
    """

    kernels: Kernels | None
    name: str = "native"
    devices: Sequence[str] | None = ("cpu",)
    dtypes: Sequence[torch.dtype] = tuple(TYPES)
    quantizations: Sequence[str] = tuple(ROUNDINGS)
    layouts: Collection[str] = tuple(BLOCK_TYPES)
    priority: int = 10
    row_invariant: bool = True
    roundings: Mapping[str, Rounding] = field(default_factory=lambda: ROUNDINGS)
    packing: Packing = AS_THEY_ARE
    store: WeightStore | None = None

    @property
    @override
    def sampler(self) -> Sampler:
        return NativeSampler(self._built)

    @override
    def why_not(self, config: DecoderConfig) -> str | None:
        if self.kernels is None:
            return "they were not built"
        return NativeDecoder.why_not(config)

    @override
    def describe(self) -> str:
        stored = ", weights in 12 bits" if self.packing.name == CODED else ""
        return f"{self._built.isa}, {self._built.threads} threads{stored}"

    @override
    def packings(self, dtype: torch.dtype) -> Sequence[str]:
        return (PLAIN, CODED) if dtype == torch.bfloat16 else (PLAIN,)

    @override
    def fastest_packing(
        self, config: DecoderConfig, quantization: str | None, weights: WeightSource | None = None
    ) -> Packing:
        """Both ways are timed for a model that is large enough."""
        return fastest_packing(self._built, config, quantization, weights)

    @override
    def row_seconds(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        quantizations: Sequence[str | None],
    ) -> list[float]:
        """Speeds of types are measured the first time."""
        roundings = [None if each is None else self.roundings[each] for each in quantizations]
        return row_seconds(self._built, config, weights, dtype, roundings)

    @override
    def scratch_bytes(self, config: DecoderConfig, rows: int, positions: int) -> int:
        return scratch_bytes(config, activations(config), self._built.threads, rows, positions)

    @override
    def with_packing(self, packing: Packing) -> NativeBackend:
        return replace(self, packing=packing)

    @override
    def with_store(self, folder: Path, facts: Sequence[str]) -> NativeBackend:
        return replace(self, store=WeightStore(WeightCache(folder, self._built), facts))

    @override
    def load(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> NativeDecoder:
        """Each tensor is packed as it is read."""
        rounding = None if quantization is None else self.roundings[quantization]
        coded = self.packing.name == CODED
        return NativeDecoder(config, weights, dtype, self._built, rounding, coded=coded, store=self.store)

    @override
    def for_drafts(self) -> NativeBackend:
        return replace(self, roundings=DRAFT_ROUNDINGS)

    @override
    def rounded_kind(self, type_: str, name: str, k: int) -> str:
        return (ROUNDINGS.get(type_) or Rounding(Type[type_.upper()])).type_of(name, k).name

    @override
    def round(self, kind: str, matrix: Tensor) -> QuantizedBlocks:
        return QuantizedBlocks(kind.lower(), tuple(matrix.shape), self._built.round(Type[kind], matrix))

    @property
    def _built(self) -> Kernels:
        assert self.kernels is not None, "the native kernels were not built"
        return self.kernels


def open_backend() -> NativeBackend:
    """Return the backend with the best instruction set; see `open_kernels`."""
    kernels = open_kernels()
    if kernels is None:
        _warn()
    return NativeBackend(kernels)


@functools.cache
def _warn() -> None:
    """Warn once that the library is missing: the package was installed without a compiler."""
    logger.warning(
        "the native kernels are not installed. On the CPU, models run on torch's kernels, which are slower and don't"
        " keep a row's bits in every batch. Install a C++ compiler (g++ or clang++), and then speculant again;"
        " `speculant doctor` says what is lost."
    )
