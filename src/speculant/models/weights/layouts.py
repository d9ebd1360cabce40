"""The layouts of rows of quantised weights: GGUF's blocks, and four of our own.

zero4   32 weights in 19 bytes: scale in float16, zero point in uint8, and 16 bytes with two integers of 4 bits each,
        the first 16 in the lower halves and the last 16 in the upper ones
zero8   32 weights in 35 bytes: scale in float16, zero point in uint8, and 32 integers in uint8
int8    a row in k + 4 bytes: scale in float32, and k integers in int8
fp8     128 weights in 132 bytes: scale in float32, and 128 numbers in e4m3 (arXiv 2209.05433); the last block of a row
        may have fewer

A weight is scale * (q - zero), or scale * q in int8 and fp8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GROUP = 32  # weights of a block
FP8_BLOCK, SCALE = 128, 4  # weights of a block of fp8; bytes of a scale in float32
DECODED_BITS = {"GPTQ": 4, "AWQ": 4, "PACKED4": 4, "PACKED8": 8, "E4M3": 8, "NF4": 4, "FP4": 4}
"""Kinds of matrices that a source decodes, because no layout holds them, and the bits of a weight without scales."""


@dataclass(frozen=True)
class BlockLayout:
    """Rows of blocks. weights: in a block. size: of a block, in bytes.

    decode: returns the numbers [n, k] in float32 of rows [n, bytes]; None = they can't be decoded. divides: whether
    some successive blocks of a row are a row of the same layout.
    """

    weights: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray] | None
    divides: bool = True


def layout_of(name: str) -> BlockLayout | None:
    """Return a layout, or a floating-point type of GGUF, by its name in upper or lower case; None = unknown."""
    return OWN.get(name.lower()) or _gguf_layout(name.upper())


def stored_bits(kind: str) -> float:
    """Return the bits that a weight takes in a file; see `WeightSource.kind`."""
    layout = layout_of(kind)
    return DECODED_BITS[kind] if layout is None else 8 * layout.size / layout.weights


@functools.cache
def _gguf_layout(kind: str) -> BlockLayout | None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    type_ = GGMLQuantizationType.__members__.get(kind)
    if type_ is None:
        return None
    weights, size = GGML_QUANT_SIZES[type_]
    try:
        dequantize(np.zeros((1, size), np.uint8), type_)
    except NotImplementedError:
        return BlockLayout(weights, size, None)
    return BlockLayout(weights, size, lambda rows: dequantize(rows, type_))


def _decode_with_zeros(rows: np.ndarray, bits: int) -> np.ndarray:
    blocks = np.ascontiguousarray(rows).reshape(-1, OWN[f"zero{bits}"].size)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    q = blocks[:, 3:]
    if bits == 4:
        q = np.concatenate((q & 15, q >> 4), axis=1)
    decoded: np.ndarray = scales * (q.astype(np.float32) - blocks[:, 2:3])
    return decoded.reshape(len(rows), -1)


def _decode_int8(rows: np.ndarray) -> np.ndarray:
    scales = np.ascontiguousarray(rows[:, :SCALE]).view(np.float32)
    decoded: np.ndarray = scales * rows[:, SCALE:].view(np.int8)
    return decoded


def _decode_fp8(rows: np.ndarray) -> np.ndarray:
    """Decode rows of e4m3, with a table of all bytes."""
    size, n = FP8_BLOCK + SCALE, len(rows)
    whole = np.zeros((n, -(-rows.shape[1] // size), size), np.uint8)
    whole.reshape(n, -1)[:, : rows.shape[1]] = rows
    scales = np.ascontiguousarray(whole[:, :, :SCALE]).view(np.float32)
    decoded: np.ndarray = scales * e4m3_numbers()[whole[:, :, SCALE:]]
    return decoded.reshape(n, -1)[:, : rows.shape[1] - SCALE * whole.shape[1]]


@functools.cache
def e4m3_numbers() -> np.ndarray:
    """Return the numbers of all bytes in e4m3, float32 [256]; two are NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    sizes[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, sizes, -sizes).astype(np.float32)


OWN = {
    "int8": BlockLayout(1, 1, _decode_int8, divides=False),
    "fp8": BlockLayout(FP8_BLOCK, FP8_BLOCK + SCALE, _decode_fp8),
    "zero4": BlockLayout(GROUP, 19, functools.partial(_decode_with_zeros, bits=4)),
    "zero8": BlockLayout(GROUP, 35, functools.partial(_decode_with_zeros, bits=8)),
}
