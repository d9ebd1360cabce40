"""compressed-tensors, as llm-compressor writes it: n outputs, k inputs, and groups of modules with the same options.

pack-quantized        weight_packed int32 [n, k bits / 32], adjacent integers of 4 or 8 bits, the lowest bits first
                      weight_zero_point int32 [n bits / 32, groups], packed along the outputs
                      weight_shape [2], and perhaps weight_g_idx [k], the group of each input
int-quantized         weight int8 [n, k]; weight_zero_point int8
float-quantized       weight e4m3 [n, k]
mxfp4-pack-quantized  weight_packed uint8 [n, k / 2], weight_scale uint8 [n, k / 32]

weight_scale has a number for the matrix, each output, each group of inputs, or each block of both. A module's tensors
show which group of options it has, so `targets` and `ignore` are not read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.errors import ModelError
from speculant.models.config import is_whole, show
from speculant.models.weights.formats import BELONGS, OTHER, Options
from speculant.models.weights.scaled import (
    MIDDLE,
    OF_CACHE,
    WORD,
    InputGroups,
    Tile,
    fp8_matrix,
    integer_matrix,
    matrix_shape,
    read_groups,
    tile_of,
    unpacked,
)  # fmt: skip
from speculant.models.weights.schemes.mxfp4 import BLOCK, mxfp4_matrix
from speculant.models.weights.source import JoinedMatrix
from speculant.models.weights.tensors import ModuleParts, Scheme

logger = logging.getLogger(__name__)

METHOD = "compressed-tensors"
WEIGHT, PACKED, SCALE, ZEROS, G_IDX, SHAPE, GLOBAL = (
    ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape",
    ".weight_global_scale",
)  # fmt: skip
OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")
FORMATS = ("dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "naive-quantized",
           "pack-quantized")  # fmt: skip
STRATEGIES = ("block", "channel", "group", "tensor")
ORDERED = ("group", "dynamic", "true")  # values of actorder; with others, the inputs of a group are neighbours
MOST_SIZE = 2**24  # of a block
HARMLESS = ("config_groups", "global_compression_ratio", "ignore", "quantization_status", "version")


@dataclass(frozen=True)
class WeightOptions:
    """How the weights of some modules are stored.

    tile: the part that has a scale; None = the matrix or a row. ordered: whether the inputs of a group are not
    neighbours, so that each matrix needs the group of each input.
    """

    bits: int
    is_float: bool
    symmetric: bool
    tile: Tile | None
    ordered: bool = False

    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        """Return the matrix of a module. Raises ModelError if it is not stored in this way."""
        if parts.has(GLOBAL):
            raise parts.error(f"{parts.module} is stored in NVFP4, which can't be read", OTHER)
        if self.symmetric and parts.has(ZEROS):
            self._check_middle(parts)
        if self.ordered or (self.is_float and parts.has(G_IDX)):
            self._check_order(parts)
        if self.is_float:
            return _four_bits(parts) if self.bits == 4 else fp8_matrix(parts, WEIGHT, SCALE, self.tile)
        if not self.symmetric:
            parts.shape(ZEROS)
        return self._integers(parts)

    def _integers(self, parts: ModuleParts) -> JoinedMatrix:
        """Return a matrix of integers. Raises ModelError for tensors that do not fit each other."""
        packed = parts.has(PACKED)
        bits, end = (self.bits, PACKED) if packed else (8, WEIGHT)
        n, k = shape = self._packed_shape(parts) if packed else matrix_shape(parts, WEIGHT, "I8")
        tile = tile_of(parts, SCALE, shape, self.tile)
        rows, columns = tile.counts(shape)
        if not self.symmetric and packed:
            parts.check(ZEROS, ["I32"], (-(-rows * bits // WORD), columns))
        elif not self.symmetric and math.prod(parts.shape(ZEROS)) != rows * columns:
            raise parts.error(f"{parts.module}{ZEROS} does not fit the scales")
        if parts.has(G_IDX):
            parts.check(G_IDX, ["I32", "I64"], (k,))

        def integers() -> np.ndarray:
            stored = parts.read(end)
            if packed:
                return np.ascontiguousarray(_row_integers(stored, bits)[:, :k])
            found: np.ndarray = stored.view(torch.uint8).numpy() ^ np.uint8(MIDDLE)
            return found

        def zeros() -> np.ndarray | None:
            if self.symmetric:
                return None
            stored = parts.read(ZEROS)
            if packed:
                found = unpacked(stored, bits, axis=0)[:rows]
            elif not torch.equal(stored.to(torch.int8).to(stored.dtype), stored):
                raise parts.error(f"{parts.module}{ZEROS} has zero points beyond 8 bits", BELONGS)
            else:
                found = stored.to(torch.int8).view(torch.uint8).numpy().reshape(rows, columns) ^ np.uint8(MIDDLE)
            return np.repeat(found, tile.rows, axis=0)[:n]

        def groups() -> InputGroups:
            unset = parts.has(G_IDX) and bool((parts.read(G_IDX) == -1).all())  # it was never filled
            return InputGroups.of_size(k, tile.columns) if unset else read_groups(parts, G_IDX, k, tile.columns)

        return integer_matrix(
            f"PACKED{bits}", parts, shape, bits, SCALE, lambda scales: tile.by_row(scales, shape), integers, zeros,
            groups(), lambda: torch.from_numpy(integers() ^ np.uint8(MIDDLE)) if packed else parts.read(end),
        )  # fmt: skip

    def _check_middle(self, parts: ModuleParts) -> None:
        """Raise ModelError for zero points of symmetric integers, or of floats, that are not 0."""
        stored, packed = parts.read(ZEROS), parts.has(PACKED) and parts.kind(ZEROS) == "I32" and not self.is_float
        middles = unpacked(stored, self.bits, 0)[: parts.shape(PACKED)[0]] if packed and stored.ndim == 2 else None
        if bool(stored.float().any()) and (middles is None or bool((middles != 2 ** (self.bits - 1)).any())):
            raise parts.error(
                f"{parts.module}{ZEROS} is not 0, and config.json says that the numbers are symmetric", BELONGS
            )

    def _check_order(self, parts: ModuleParts) -> None:
        """Raise ModelError for a matrix without the order of its inputs, or for an order of the inputs of floats."""
        if self.is_float:
            raise parts.error(f"{parts.module}{G_IDX} is an order of the inputs of floats, which can't be read", OTHER)
        if not parts.has(G_IDX) or bool((parts.read(G_IDX) == -1).any()):
            raise parts.error(
                f"{parts.module} does not have the group of each input ({G_IDX[1:]}), and config.json says that inputs"
                " have an order (actorder)",
                BELONGS,
            )

    def _packed_shape(self, parts: ModuleParts) -> tuple[int, int]:
        """Return the shape of a matrix of packed integers. Raises ModelError if it does not fit their words."""
        rows, words = matrix_shape(parts, PACKED, "I32")
        parts.check(SHAPE, ["I32", "I64"], (2,))
        n, k = parts.read(SHAPE).tolist()
        if n != rows or k < 1 or -(-k * self.bits // WORD) != words:
            raise parts.error(
                f"{parts.module}{SHAPE} says [{n}, {k}], and {PACKED[1:]} is {[rows, words]}, which does not fit"
                f" integers of {self.bits} bits",
                BELONGS,
            )
        return n, k


def _row_integers(words: Tensor, bits: int) -> np.ndarray:
    """Return the integers of 4 or 8 bits in rows of words int32 [n, c]; see `unpacked`."""
    whole: np.ndarray = words.numpy().view(np.uint8)
    if bits == 8:
        return whole
    found = np.empty((*whole.shape, 2), np.uint8)
    found[..., 0], found[..., 1] = whole & np.uint8(15), whole >> np.uint8(4)
    return found.reshape(len(whole), -1)


def _four_bits(parts: ModuleParts) -> JoinedMatrix:
    """Return a matrix in MXFP4. Raises ModelError for tensors that do not fit each other."""
    n, size = matrix_shape(parts, PACKED, "U8")
    parts.check(SCALE, ["U8", "F8_E8M0"], (n, 2 * size // BLOCK))
    shape = (n, parts.shape(SCALE)[1] * BLOCK)
    parts.check(PACKED, ["U8"], (n, shape[1] // 2))
    return mxfp4_matrix(parts, PACKED, SCALE, shape)


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """See `Scheme`."""

    groups: tuple[WeightOptions, ...]
    marks = (PACKED, SCALE)
    parts = (WEIGHT, PACKED, SCALE, ZEROS, G_IDX, SHAPE, GLOBAL, *OF_ACTIVATIONS)
    unread = (*OF_CACHE, *OF_ACTIVATIONS)

    @override
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        """The first options that the tensors fit are the module's."""
        problem: ModelError | None = None
        for group in sorted(self.groups, key=lambda each: each.symmetric == parts.has(ZEROS)):
            try:
                return group.matrix(parts)
            except ModelError as error:
                problem = problem or error
        assert problem is not None
        raise problem


def read_scheme(options: Mapping[str, Any]) -> CompressedTensors:
    """Return the scheme with the options of config.json's quantization_config. Raises ModelError."""
    read = Options(METHOD, options)
    read.one_of("format", FORMATS, "dense")
    sparsity = read.get("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise read.error("sparsity_config", sparsity, "stores sparse matrices, which can't be read")
    read.refuse("transform_config", "moe_sparsity_config")
    groups = read.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise read.error("config_groups", groups, "does not map names to options")
    found = tuple(_read_weights(group) for group in groups.values() if group.get("weights") is not None)
    if not found:
        raise read.error("config_groups", groups, "has no options for weights")
    _warn_of_activations(options, groups)
    read.warn_of_others((*HARMLESS, "kv_cache_scheme"))
    return CompressedTensors(found)


def _read_weights(group: Mapping[str, Any]) -> WeightOptions:
    """Read the options of a group for weights. Raises ModelError."""
    given = group["weights"]
    Options(METHOD, group).one_of("format", FORMATS, "dense")
    if not isinstance(given, dict):
        raise Options(METHOD, group).error("weights", given, "does not map names to options")
    read = Options(METHOD, given)
    is_float = read.one_of("type", ("float", "int"), "int") == "float"
    bits = read.one_of("num_bits", (4, 8), 8)
    read.refuse("dynamic")
    size, structure = read.get("group_size"), read.get("block_structure")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = read.one_of("strategy", STRATEGIES, usual)
    ordered = str(read.get("actorder", "")).lower() in ORDERED
    if strategy == "group" and (size := read.group_size()) != -1:
        return WeightOptions(bits, is_float, _is_symmetric(read), Tile(1, size), ordered)
    tile = _read_block(read, structure) if strategy == "block" else None
    return WeightOptions(bits, is_float, _is_symmetric(read), tile, ordered)


def _is_symmetric(read: Options) -> bool:
    return bool(read.one_of("symmetric", (False, True), True))


def _read_block(read: Options, given: Any) -> Tile:
    """Return the rows and columns of a block: a list of two, or text such as 128x128."""
    sizes = (
        [int(part) if part.isdecimal() and len(part) < 10 else part for part in given.split("x")]
        if isinstance(given, str)
        else given
    )
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(is_whole(size) and 0 < size <= MOST_SIZE for size in sizes)
    ):
        raise read.error("block_structure", given, "is not the size of a block")
    return Tile(*sizes)


def _warn_of_activations(options: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn of options that round other numbers than weights: they have no effect here."""
    unused = [key for key in ("output_activations",) if any(group.get(key) for group in groups.values())]
    if options.get("kv_cache_scheme"):
        unused.append(f"kv_cache_scheme ({show(options['kv_cache_scheme'])})")
    if unused:
        logger.warning(
            "the quantization_config (%s) also rounds other numbers than weights, which has no effect here: %s. Keys,"
            " values and outputs stay more precise.",
            METHOD, ", ".join(unused),
        )  # fmt: skip
