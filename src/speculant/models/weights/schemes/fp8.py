"""FP8 in Hugging Face's form: weights scale * number of n outputs and k inputs, with numbers in e4m3.

weight            e4m3 [n, k]
weight_scale_inv  floats [n / rows, k / columns], for blocks of `weight_block_size`; the last ones may be smaller
weight_scale      floats, in its place: one for the matrix, or one for each output

Activations are not rounded, so their scales are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from speculant.models.config import is_whole
from speculant.models.weights.formats import Options
from speculant.models.weights.scaled import OF_CACHE, Tile, fp8_matrix
from speculant.models.weights.source import JoinedMatrix
from speculant.models.weights.tensors import ModuleParts, Scheme

WEIGHT, INVERSE, SCALE = ".weight", ".weight_scale_inv", ".weight_scale"
OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale")
HARMLESS = (
    "activation_scheme",
    "dequantize",
    "ignored_layers",
    "kv_cache_scheme",
    "modules_to_not_convert",
    "scale_fmt",
)
MOST_SIZE = 2**24  # of a block


@dataclass(frozen=True)
class Fp8(Scheme):
    """See `Scheme`. tile: the part of a matrix that has a scale; None = a row or the matrix."""

    tile: Tile | None
    marks = (INVERSE, SCALE)
    parts = (WEIGHT, INVERSE, SCALE, *OF_ACTIVATIONS)
    unread = (*OF_CACHE, *OF_ACTIVATIONS)

    @override
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        if parts.has(INVERSE) and parts.has(SCALE):
            raise parts.error(f"{parts.module} has both {INVERSE[1:]} and {SCALE[1:]}, of which one is its scale")
        return fp8_matrix(parts, WEIGHT, INVERSE if parts.has(INVERSE) else SCALE, self.tile)


def read_scheme(options: Mapping[str, Any]) -> Fp8:
    """Return the scheme with the options of config.json's quantization_config. Raises ModelError."""
    read = Options("fp8", options)
    read.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    sizes = read.get("weight_block_size")
    if sizes is not None and not (
        isinstance(sizes, list) and len(sizes) == 2 and all(is_whole(size) and 0 < size <= MOST_SIZE for size in sizes)
    ):
        raise read.error("weight_block_size", sizes, "is not the size of a block")
    read.warn_of_others(HARMLESS)
    return Fp8(Tile(*sizes) if sizes else None)
