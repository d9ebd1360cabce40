"""The blocks that tests make: random blocks are valid and differ, encoded ones are near their weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gguf_blocks import EXTREMES, FLOATS, KINDS, SCALES, block_bytes, decode, encode, random_blocks, row_bytes

# The largest relative error of an encoder, for normal numbers.
ERRORS = {
    "F32": 0.0, "F16": 3e-4, "BF16": 2e-3, "Q8_0": 0.006, "Q4_0": 0.1, "Q4_1": 0.09, "Q5_0": 0.05, "Q5_1": 0.045,
    "Q4_K": 0.09, "Q5_K": 0.045, "Q6_K": 0.02, "IQ4_NL": 0.09, "MXFP4": 0.14,
    "ZERO4": 0.1, "ZERO8": 0.006,
}  # fmt: skip


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_weights_are_near(kind: str) -> None:
    weights = generator().standard_normal((20, 768)).astype(np.float32)
    blocks = encode(kind, weights)
    assert blocks.shape == (20, row_bytes(kind, 768))
    difference = decode(kind, blocks) - weights
    error = np.linalg.norm(difference) / np.linalg.norm(weights)
    assert ERRORS[kind] / 2 <= error <= ERRORS[kind], "the error is near its bound"


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    weights = generator().standard_normal((3, 512)).astype(np.float32)
    weights[1] = 0
    assert not decode(kind, encode(kind, weights))[1].any()


@pytest.mark.parametrize("extreme", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_are_finite(kind: str, extreme: float) -> None:
    blocks = random_blocks(kind, 40, 1024, generator(), extreme)
    assert blocks.dtype == np.uint8
    assert blocks.shape == (40, row_bytes(kind, 1024))
    weights = decode(kind, blocks)
    assert weights.dtype == np.float32
    assert weights.shape == (40, 1024)
    assert np.isfinite(weights).all()
    assert np.unique(weights).size > (3 if kind in FLOATS else 40)


@pytest.mark.parametrize("kind", KINDS)
def test_usual_weights_have_similar_sizes(kind: str) -> None:
    sizes = np.abs(decode(kind, random_blocks(kind, 40, 1024, generator(), extreme=0)))
    assert 0.01 < np.median(sizes) < 10
    assert sizes.max() < 200


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FLOATS])
def test_bytes_beside_the_scales_have_every_value(kind: str) -> None:
    blocks = random_blocks(kind, 1000, 2048, generator()).reshape(-1, block_bytes(kind))
    scales = [place + byte for place in SCALES.get(kind, []) for byte in (0, 1)] if kind != "MXFP4" else [0]
    others = np.delete(blocks, scales, axis=1)
    assert all(np.unique(column).size == 256 for column in others.T)


@pytest.mark.parametrize("kind", SCALES)
def test_scales_are_extreme_at_times(kind: str) -> None:
    blocks = random_blocks(kind, 100, 2048, generator()).reshape(-1, block_bytes(kind))
    extremes = EXTREMES.astype(np.float16).view(np.int16)
    for place in SCALES[kind]:
        scales = np.ascontiguousarray(blocks[:, place : place + 2]).view(np.int16)[:, 0]
        assert 0.05 < np.isin(scales, extremes).mean() < 0.15
        assert np.isin(extremes, scales).all()
