"""MXFP4 in safetensors: a matrix, or a stack of them, is two tensors.

name_blocks   uint8 [..., n, k / 32, 16]   each byte has two numbers of 4 bits, the first one in the lower half
name_scales   uint8 [..., n, k / 32]       the exponents of the blocks

They are read as GGUF's blocks of 17 bytes: the exponent, then 16 bytes with the first 16 numbers in the lower halves
and the last 16 in the upper ones. The numbers stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.files import Stamp
from speculant.models.weights.source import QuantizedBlocks
from speculant.models.weights.tensors import TensorFiles

BLOCKS, SCALES = "_blocks", "_scales"
KIND, METHOD = "MXFP4", "mxfp4"  # the name of such a config.json's quant_method
BLOCK, BYTES = 32, 16  # numbers of a block, and their bytes


@dataclass(frozen=True)
class BlockFiles:
    """`StoredWeights` of safetensors files, some of whose tensors are in blocks."""

    files: TensorFiles

    @cached_property
    def _paired(self) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors in blocks, by name. Raises ModelError for blocks without scales that fit them."""
        found: dict[str, tuple[int, ...]] = {}
        for stored, entry in self.files.entries.items():
            name = stored.removesuffix(BLOCKS)
            if name == stored:
                continue
            scales = self.files.entries.get(name + SCALES)
            if scales is None or (*scales.shape, BYTES) != entry.shape or {entry.kind, scales.kind} != {"U8"}:
                raise ModelError(
                    f"{stored} is {entry.kind} {list(entry.shape)}, and its scales do not fit it",
                    "download the checkpoint again.",
                )
            found[name] = (*entry.shape[:-2], entry.shape[-2] * BLOCK)
        return found

    @property
    def _plain(self) -> TensorFiles:
        """The files without tensors in blocks."""
        halves = {name + half for name in self._paired for half in (BLOCKS, SCALES)}
        return replace(self.files, entries={k: v for k, v in self.files.entries.items() if k not in halves})

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
        return torch.bfloat16

    def quantised_kinds(self) -> list[str]:
        """See `StoredWeights.quantised_kinds`."""
        return [KIND]

    def check_kinds(self) -> None:
        """See `StoredWeights.check_kinds`."""
        self._plain.check_kinds()

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return [*self._plain.names(), *self._paired]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self._paired[name] if name in self._paired else self.files.shape(name)

    def kind(self, name: str) -> str:
        """See `WeightSource.kind`."""
        return KIND if name in self._paired else self.files.kind(name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        if name not in self._paired:
            return self.files.read(name)
        return _joined(self.files.read(name + BLOCKS), self.files.read(name + SCALES))

    def read_stacked(self, name: str, index: int) -> Tensor | QuantizedBlocks:
        """See `ReadsStacks.read_stacked`."""
        if name not in self._paired:
            return self.files.read_stacked(name, index)
        halves = (self.files.read_stacked(name + half, index) for half in (BLOCKS, SCALES))
        return _joined(*halves)


def _joined(blocks: Tensor, scales: Tensor) -> QuantizedBlocks:
    """Return blocks [..., n, k / 32, 16] and scales [..., n, k / 32] in GGUF's order."""
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK)
    pairs = blocks.reshape(-1, BYTES)
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=2).view(-1, 2, BYTES)  # the first and the last 16
    joined = torch.cat((scales.reshape(-1, 1), numbers[:, 0] | numbers[:, 1] << 4), dim=1)
    return QuantizedBlocks(METHOD, shape, joined.view(math.prod(shape[:-1]), -1))
