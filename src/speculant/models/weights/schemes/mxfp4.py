"""MXFP4: a matrix, or a stack of them, is two tensors.

name_blocks   uint8 [..., n, k / 32, 16]   each byte has two numbers of 4 bits, the first one in the lower half
name_scales   uint8 [..., n, k / 32]       the exponents of the blocks

They are read as GGUF's blocks of 17 bytes: the exponent, then 16 bytes with the first 16 numbers in the lower halves
and the last 16 in the upper ones. The numbers stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from speculant.models.weights.source import JoinedMatrix, QuantizedBlocks
from speculant.models.weights.tensors import AGAIN, ModuleParts, Scheme

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK, BYTES = 32, 16  # numbers of a block, and their bytes
NAN = 255  # the only exponent that is no power of two


def mxfp4_matrix(parts: ModuleParts, pairs: str, scales: str, shape: tuple[int, ...]) -> JoinedMatrix:
    """Return a matrix, or stacked ones, of bytes with two numbers each, and of the exponents of blocks of 32 numbers.

    pairs, scales: the ends of the tensors' names. Reading raises ModelError for exponents that stand for NaN.
    """

    def read(index: int | None = None) -> QuantizedBlocks:
        exponents = parts.read(scales, index).view(torch.uint8)
        if bool((exponents == NAN).any()):
            raise parts.error(f"{parts.module}{scales} has scales that are NaN", AGAIN)
        stored, own = parts.read(pairs, index).reshape(-1, BYTES), shape if index is None else shape[1:]
        numbers = torch.stack((stored & 15, stored >> 4), dim=2).view(-1, 2, BYTES)  # the first and the last 16
        joined = torch.cat((exponents.reshape(-1, 1), numbers[:, 0] | numbers[:, 1] << 4), dim=1)
        return QuantizedBlocks("mxfp4", own, joined.view(math.prod(own[:-1]), -1))

    return JoinedMatrix(shape, "MXFP4", read, part=read)


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """See `Scheme`."""

    marks = (BLOCKS,)
    parts = (BLOCKS, SCALES)
    weight = ""

    @override
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        blocks, kind = parts.shape(BLOCKS), parts.kind(BLOCKS)
        scales = parts.shape(SCALES) if parts.has(SCALES) else ()
        if len(blocks) < 3 or (*scales, BYTES) != blocks or {kind, parts.kind(SCALES)} != {"U8"}:
            raise parts.error(f"{parts.module}{BLOCKS} is {kind} {list(blocks)}, and its scales do not fit it", AGAIN)
        return mxfp4_matrix(parts, BLOCKS, SCALES, (*blocks[:-2], blocks[-2] * BLOCK))


def read_scheme(options: Mapping[str, Any]) -> Mxfp4:
    """Return the scheme. options: of config.json; none changes a number."""
    return Mxfp4()
