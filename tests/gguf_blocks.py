"""Matrices in blocks: random blocks, encoded weights, and their decoding by the `gguf` package.

That package decodes every type of GGUF here, and encodes all of them but Q4_K, Q5_K, Q6_K and IQ4_NL. Their encoders
are below, and all of ZERO4 and ZERO8, which GGUF lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants as gguf_quants

FLOATS = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype("u2")}
SCALES = {  # the places of a block's float16 numbers; all other bytes may have any value
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "ZERO4": [0],
    "ZERO8": [0],
}
ZEROS = {"ZERO4": 4, "ZERO8": 8}  # bits of an integer; a block of 32 weights has a scale, a zero and the integers
KINDS = (*FLOATS, *SCALES, "MXFP4")
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 3e-5, -5e-5, 65504.0, -65504.0])  # of float16, subnormal ones too
MXFP4_EXPONENTS = 220  # larger ones make sums of products infinite, those from 253 on even weights
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def block_weights(kind: str) -> int:
    """Return the number of weights in a block."""
    return 32 if kind in ZEROS else GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def block_bytes(kind: str) -> int:
    """Return the number of bytes of a block."""
    return 3 + 4 * ZEROS[kind] if kind in ZEROS else GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]


def row_bytes(kind: str, k: int) -> int:
    """Return the number of bytes of a row of k weights."""
    assert k % block_weights(kind) == 0, f"{kind} has whole blocks of {block_weights(kind)}"
    return k // block_weights(kind) * block_bytes(kind)


def random_blocks(kind: str, n: int, k: int, generator: np.random.Generator, extreme: float = 0.1) -> np.ndarray:
    """Return random valid blocks, uint8 [n, bytes of a row]. Every weight that they stand for is finite.

    extreme: the share of scales, or of weights without one, that are zero, subnormal or the largest ones.
    """
    if kind in FLOATS:
        return _random_floats(kind, n, k, generator, extreme)
    blocks = generator.integers(0, 256, (n * row_bytes(kind, k) // block_bytes(kind), block_bytes(kind)), np.uint8)
    for place in SCALES.get(kind, []):
        scales = _random_numbers(len(blocks), generator, extreme, usual=1 / 64)
        blocks[:, place : place + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if kind == "MXFP4":
        usual = generator.integers(119, 130, len(blocks))
        every = generator.integers(0, MXFP4_EXPONENTS, len(blocks))
        blocks[:, 0] = np.where(generator.random(len(blocks)) < extreme, every, usual)
    return blocks.reshape(n, -1)


def _random_floats(kind: str, n: int, k: int, generator: np.random.Generator, extreme: float) -> np.ndarray:
    numbers = _random_numbers(n * k, generator, extreme).astype(np.float32).reshape(n, k)
    return encode(kind, numbers)


def _random_numbers(count: int, generator: np.random.Generator, extreme: float, usual: float = 1.0) -> np.ndarray:
    """Return numbers that float16 holds: normal ones with this deviation, and a share of extreme ones."""
    normal = usual * generator.standard_normal(count)
    return np.where(generator.random(count) < extreme, generator.choice(EXTREMES, count), normal)


def decode(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Return the weights [n, k] in float32 that blocks stand for."""
    if kind in ZEROS:
        return _decode_with_zeros(blocks.reshape(-1, block_bytes(kind))).reshape(len(blocks), -1)
    return gguf_quants.dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType[kind])


def _decode_with_zeros(blocks: np.ndarray) -> np.ndarray:
    """Return the weights scale (q - zero) of blocks in a type of ZEROS."""
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    q = blocks[:, 3:] if blocks.shape[1] == 35 else np.concatenate([blocks[:, 3:] & 15, blocks[:, 3:] >> 4], axis=1)
    return scales * (q.astype(np.float32) - blocks[:, 2:3].astype(np.float32))


def encode(kind: str, weights: np.ndarray) -> np.ndarray:
    """Return blocks, uint8 [n, bytes of a row], that stand for about these weights [n, k] in float32."""
    n, k = weights.shape
    if kind in _ENCODERS:
        blocks = _ENCODERS[kind](weights.reshape(-1, block_weights(kind)))
    else:
        blocks = gguf_quants.quantize(np.ascontiguousarray(weights), GGMLQuantizationType[kind])
    return blocks.view(np.uint8).reshape(n, row_bytes(kind, k))


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a / b, zero where b is."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _halves(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers in float16 as bytes [n, 2], and the numbers in float32 that are stored [n, 1]."""
    stored = numbers.astype(np.float16).reshape(-1, 1)
    return stored.view(np.uint8), stored.astype(np.float32)


def _encode_with_minimums(weights: np.ndarray, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Encode blocks of 256 in 8 groups: w = d * scale * q - dmin * minimum, with scales and minimums of 6 bits.

    Returns the bytes of d, dmin and the scales, and q [n, 8, 32], from 0 to `most`.
    """
    groups = weights.reshape(-1, 8, 32)
    lows = np.minimum(groups.min(axis=2), 0)
    steps = (groups.max(axis=2) - lows).clip(0) / most
    d, d_value = _halves(steps.max(axis=1) / 63)
    dmin, dmin_value = _halves(-lows.min(axis=1) / 63)
    scales, minimums = (
        np.rint(_ratio(numbers, unit)).clip(0, 63).astype(np.uint8)
        for numbers, unit in ((steps, d_value), (-lows, dmin_value))
    )
    shifted = groups + (dmin_value * minimums)[..., None]
    q = np.rint(_ratio(shifted, (d_value * scales)[..., None])).clip(0, most).astype(np.uint8)
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, minimums)]
    last = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return [d, dmin, *first, last], q


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Return the low four bits of groups [n, 8, 32]: two groups in a byte each."""
    return (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(len(q), -1)


def _encode_q4_k(weights: np.ndarray) -> np.ndarray:
    head, q = _encode_with_minimums(weights, 15)
    return np.concatenate([*head, _nibbles(q)], axis=1)


def _encode_q5_k(weights: np.ndarray) -> np.ndarray:
    head, q = _encode_with_minimums(weights, 31)
    high = np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)  # bit g: of group g
    return np.concatenate([*head, high, _nibbles(q)], axis=1)


def _extremes(groups: np.ndarray) -> np.ndarray:
    """Return the number with the largest magnitude of each group."""
    return np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], axis=-1)[..., 0]


def _encode_q6_k(weights: np.ndarray) -> np.ndarray:
    groups = weights.reshape(-1, 16, 16)
    steps = _extremes(groups) / -32
    d, d_value = _halves(np.abs(steps).max(axis=1) / 127)
    scales = np.rint(_ratio(steps, d_value)).clip(-127, 127).astype(np.int8)
    q = np.rint(_ratio(groups, (d_value * scales)[..., None])).clip(-32, 31).astype(np.int8) + 32
    quarters = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # of each half
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=2)
    parts = (low, high, scales.view(np.uint8), d)
    return np.concatenate([part.reshape(len(q), -1) for part in parts], axis=1)


def _encode_iq4_nl(weights: np.ndarray) -> np.ndarray:
    d, d_value = _halves(_extremes(weights) / -127)
    levels = _ratio(weights, d_value)[..., None]
    q = np.abs(levels - IQ4_LEVELS).argmin(axis=-1).astype(np.uint8)
    return np.concatenate([d, q[:, :16] | q[:, 16:] << 4], axis=1)


def _encode_with_zeros(weights: np.ndarray, bits: int) -> np.ndarray:
    most = 2**bits - 1
    lows, highs = np.minimum(weights.min(axis=1), 0), np.maximum(weights.max(axis=1), 0)
    d, d_value = _halves((highs - lows) / most)
    zeros = np.rint(_ratio(-lows[:, None], d_value)).clip(0, most)
    q = (np.rint(_ratio(weights, d_value)) + zeros).clip(0, most).astype(np.uint8)
    return np.concatenate([d, zeros.astype(np.uint8), q if bits == 8 else q[:, :16] | q[:, 16:] << 4], axis=1)


_ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_K": _encode_q4_k,
    "Q5_K": _encode_q5_k,
    "Q6_K": _encode_q6_k,
    "IQ4_NL": _encode_iq4_nl,
    "ZERO4": partial(_encode_with_zeros, bits=4),
    "ZERO8": partial(_encode_with_zeros, bits=8),
}
