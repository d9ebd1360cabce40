"""bitsandbytes: numbers of 4 bits from a table (arXiv 2305.14314), or rows of int8 (arXiv 2208.07339).

4 bits   weight uint8 [n k / 2, 1]    indices of numbers in the order of the rows, the first of a pair in the upper half
         weight.quant_map             float32 [16], the numbers
         weight.absmax                float32 [blocks], the scale of `blocksize` successive numbers; or uint8 [blocks],
         weight.nested_absmax, weight.nested_quant_map and `nested_offset`, which the scales are computed from
         weight.quant_state.bitsandbytes__nf4 (or fp4): uint8, JSON with these sizes and the shape
8 bits   weight int8 [n, k]; SCB float32 [n], 127 times the scale of each row

Numbers of 4 bits are decoded. Rows of int8 keep their numbers. Outlying activations are rounded like the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from speculant.models.config import is_whole, show
from speculant.models.weights.formats import OTHER, Options
from speculant.models.weights.scaled import int8_rows, matrix_shape, read_scales
from speculant.models.weights.source import DECODED_AT_ONCE, JoinedMatrix
from speculant.models.weights.tensors import ModuleParts, Scheme

WEIGHT, SCB = ".weight", ".SCB"
TILES = (".weight_format", ".weight.weight_format")  # 0 = rows; others are orders that GPUs had
STATE = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
MAP, ABSMAX, NESTED_MAP, NESTED = (
    ".weight.quant_map", ".weight.absmax", ".weight.nested_quant_map", ".weight.nested_absmax",
)  # fmt: skip
MOST_STATE, MOST_SIZE = 2**16, 2**24  # bytes of JSON; weights of a block, and inputs or outputs
MOST_OFFSET = 1e30  # of scales; NaN is refused too


@dataclass(frozen=True)
class Blocks:
    """The sizes in a quant_state. nested: scales of a block of scales; None = they are not quantised."""

    shape: tuple[int, int]
    size: int
    nested: int | None
    offset: float


def _four_bits(parts: ModuleParts, type_: str) -> JoinedMatrix:
    """Return a matrix of numbers of 4 bits. Raises ModelError for tensors that do not fit each other."""
    blocks = _blocks(parts, STATE[type_])
    count = math.prod(blocks.shape)
    scales = -(-count // blocks.size)
    parts.check(MAP, ["F32"], (16,))
    parts.check(ABSMAX, ["F32"] if blocks.nested is None else ["U8"], (scales,))
    if blocks.nested is not None:
        parts.check(NESTED, ["F32"], (-(-scales // blocks.nested),))
        parts.check(NESTED_MAP, ["F32"], (256,))
    if parts.kind(WEIGHT) != "U8" or math.prod(parts.shape(WEIGHT)) != -(-count // 2):
        raise parts.error(f"{parts.module}{WEIGHT} does not have {count} numbers of 4 bits")
    kind = type_.upper()
    return JoinedMatrix(blocks.shape, kind, lambda: _decoded(parts, blocks), f"the kernels can't multiply by {kind}")


def _blocks(parts: ModuleParts, end: str) -> Blocks:
    """Return the sizes that a quant_state names. Raises ModelError."""
    stored = parts.shape(end)
    if parts.kind(end) != "U8" or len(stored) != 1 or stored[0] > MOST_STATE:
        raise parts.error(f"{parts.module}{end} is {parts.kind(end)} {list(stored)} instead of JSON")
    try:
        state = json.loads(bytes(parts.read(end).tolist()))
    except (ValueError, RecursionError):
        state = None
    found = _read_blocks(state) if isinstance(state, dict) else None
    if found is None:
        raise parts.error(f"{parts.module}{end} has no usable sizes: {show(state)}")
    return found


def _scales(parts: ModuleParts, blocks: Blocks) -> Tensor:
    """Read the scales of all blocks in float32."""
    if blocks.nested is None:
        return read_scales(parts, ABSMAX)
    outer = read_scales(parts, NESTED).repeat_interleave(blocks.nested)
    inner = read_scales(parts, NESTED_MAP)[parts.read(ABSMAX).long()]
    return inner * outer[: len(inner)] + blocks.offset


def _decoded(parts: ModuleParts, blocks: Blocks) -> Tensor:
    """Read the numbers in float32. Raises ModelError for numbers that are not finite."""
    pairs, numbers, scales = parts.read(WEIGHT).flatten(), read_scales(parts, MAP), _scales(parts, blocks)
    found, size = torch.empty(math.prod(blocks.shape), dtype=torch.float32, device="cpu"), blocks.size
    step = 2 * size * max(1, DECODED_AT_ONCE // (2 * size))  # whole blocks, and whole bytes
    for first in range(0, len(found), step):
        part, own = pairs[first // 2 : (first + step) // 2], found[first : first + step]
        decoded = numbers[torch.stack((part >> 4, part & 15), dim=1).flatten()[: len(own)].int()]
        by_number = scales[first // size : (first + step) // size].repeat_interleave(size)[: len(own)]
        torch.mul(decoded, by_number, out=own)
    return found.view(blocks.shape)


def _read_blocks(state: Mapping[str, Any]) -> Blocks | None:
    """Return the sizes in a quant_state; None if it has none that can be used."""
    shape, nested, offset = state.get("shape"), state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not isinstance(offset, float | int)
        or isinstance(offset, bool)
    ):
        return None
    if nested is not None and "nested_offset" not in state:
        return None
    sizes = [*shape, state.get("blocksize"), 1 if nested is None else nested]
    if not all(is_whole(size) and 0 < size <= MOST_SIZE for size in sizes) or not abs(offset) < MOST_OFFSET:
        return None
    return Blocks((sizes[0], sizes[1]), sizes[2], nested, float(offset))


def _int8(parts: ModuleParts) -> JoinedMatrix:
    """Return rows of int8. Raises ModelError for tensors that do not fit each other."""
    shape = matrix_shape(parts, WEIGHT, "I8")
    parts.check(SCB, ["F16", "F32"], shape[:1])
    for end in filter(parts.has, TILES):
        if parts.kind(end) != "U8" or any(parts.read(end).flatten().tolist()):
            raise parts.error(f"{parts.module}{WEIGHT} is stored in tiles for a GPU", OTHER)
    return JoinedMatrix(shape, "INT8", lambda: int8_rows(parts.read(WEIGHT), read_scales(parts, SCB)[:, None] / 127))


@dataclass(frozen=True)
class BitsAndBytes(Scheme):
    """See `Scheme`."""

    marks = (*STATE.values(), SCB)
    parts = (
        WEIGHT, SCB, *TILES, MAP, ABSMAX, NESTED_MAP, NESTED, *STATE.values(),
    )  # fmt: skip

    @override
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        if parts.has(SCB):
            return _int8(parts)
        return _four_bits(parts, next(kind for kind, end in STATE.items() if parts.has(end)))


def read_scheme(options: Mapping[str, Any]) -> BitsAndBytes:
    """Return the scheme. options: of config.json. Raises ModelError for numbers of 4 bits in another type."""
    read = Options("bitsandbytes", options)
    read.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    return BitsAndBytes()
