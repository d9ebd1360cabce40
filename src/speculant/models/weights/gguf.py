"""The tensors of a GGUF file, mapped; blocks stay as they are stored."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.files import Stamp
from speculant.gguf_file import GgufFile, GgufTensor
from speculant.models.gguf import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from speculant.models.weights.source import FLOATS, QuantizedBlocks, decodable, decode

GOOD = "Q4_K_M, Q5_K_M, Q6_K or Q8_0"  # files whose blocks the native kernels multiply by
_SHOWN = 5  # tensors in a message


@dataclass(frozen=True)
class GgufWeights:
    """A `WeightSource`: the tensors of a file, or of all parts of a split one."""

    file: GgufFile

    @property
    def described_by(self) -> str:
        """See `StoredWeights.described_by`."""
        return "its metadata"

    @property
    def place(self) -> Path:
        """See `StoredWeights.place`: the file, or the first part."""
        return self.file.path

    def names(self) -> Collection[str]:
        """See `WeightSource.names`; without the factors of rotary positions, which the description holds."""
        return [name for name in self.file.tensors if name not in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.file.tensors[name].shape

    def kind(self, name: str) -> str:
        """See `WeightSource.kind`."""
        return self.file.tensors[name].kind

    def stamps(self) -> list[Stamp]:
        """See `StoredWeights.stamps`: those of all parts."""
        return [Stamp.of(part) for part in self.file.parts]

    def quantised_kinds(self) -> list[str]:
        """See `StoredWeights.quantised_kinds`."""
        return sorted({self.file.tensors[name].kind for name in self.names()} - FLOATS.keys())

    def common_dtype(self) -> torch.dtype:
        """See `StoredWeights.common_dtype`."""
        if self.quantised_kinds():
            return torch.bfloat16
        sizes = Counter[str]()
        for name in self.names():
            sizes[self.kind(name)] += math.prod(self.shape(name))
        return FLOATS[sizes.most_common(1)[0][0]]

    def check_kinds(self) -> None:
        """See `StoredWeights.check_kinds`."""
        kinds = {name: self.file.tensors[name].kind for name in self.names()}
        wrong = sorted(f"{name} is {kind}" for name, kind in kinds.items() if not _is_readable(kind))
        if wrong:
            more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ModelError(
                f"{self.place} has tensors of kinds that can't be decoded ({', '.join(wrong[:_SHOWN])}{more})",
                f"use a file of the model in {GOOD}, or with floating-point weights.",
            )

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`. Blocks are mapped; the mapping ends with the tensor."""
        tensor = self.file.tensors[name]
        content = _mapped(tensor)
        if tensor.kind in FLOATS:
            return content.view(FLOATS[tensor.kind]).view(tensor.shape)
        *rows, depth = tensor.shape
        blocks = QuantizedBlocks(tensor.kind.lower(), tensor.shape, content.view(math.prod(rows), -1))
        if rows:
            return blocks
        return decode(replace(blocks, shape=(1, depth)), torch.float32)[0]


def _is_readable(kind: str) -> bool:
    return kind in FLOATS or decodable(kind.lower())


def _mapped(tensor: GgufTensor) -> Tensor:
    """Map the bytes of a tensor. A write would change this process's copy of a page, never the file."""
    before = tensor.offset % mmap.ALLOCATIONGRANULARITY
    try:
        with tensor.file.open("rb") as file:
            pages = mmap.mmap(
                file.fileno(), tensor.size + before, access=mmap.ACCESS_COPY, offset=tensor.offset - before
            )
    except (OSError, ValueError) as error:  # the file has become shorter
        raise ModelError(
            f"{tensor.file} can't be read: {error}", "check that it is complete and that you may read it."
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8)[before:]
