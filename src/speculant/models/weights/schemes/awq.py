"""AWQ (arXiv 2306.00978) in AutoAWQ's layout "gemm": weights scale * (q - zero) of n outputs and k inputs.

qweight   int32 [k, n / 8]        integers q of 4 bits; a word has 8 adjacent ones of a row, in the order of PLACES
qzeros    int32 [groups, n / 8]   zero points, in the same order
scales    floats [groups, n]

The inputs of a group are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from speculant.models.weights.formats import HARMLESS, Options
from speculant.models.weights.scaled import SCALES_OF_16, InputGroups, integer_matrix, unpacked
from speculant.models.weights.source import JoinedMatrix
from speculant.models.weights.tensors import ModuleParts, Scheme

QWEIGHT, QZEROS, SCALES = ".qweight", ".qzeros", ".scales"
BITS, PER_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's integers; place 0 has the lowest bits
OWN = (
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "modules_to_not_convert",
)  # entries without an effect on numbers


@dataclass(frozen=True)
class Awq(Scheme):
    """See `Scheme`. size: inputs of a group; -1 = one group."""

    size: int
    marks = (QWEIGHT,)
    parts = (QWEIGHT, QZEROS, SCALES)

    @override
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        shape = parts.shape(QWEIGHT)
        if len(shape) != 2 or 0 in shape:
            raise parts.error(f"{parts.module}{QWEIGHT} is {list(shape)}, which is not a matrix")
        k, words = shape
        groups = InputGroups.of_size(k, k if self.size == -1 else self.size)
        parts.check(QWEIGHT, ["I32"], shape)
        parts.check(QZEROS, ["I32"], (groups.count, words))
        parts.check(SCALES, SCALES_OF_16, (groups.count, words * PER_WORD))
        return integer_matrix(
            "AWQ", parts, (words * PER_WORD, k), BITS, SCALES, Tensor.t, lambda: _unpacked(parts, QWEIGHT),
            lambda: _unpacked(parts, QZEROS), groups,
        )  # fmt: skip


def _unpacked(parts: ModuleParts, end: str) -> np.ndarray:
    """Return the integers [n, ...] of a tensor."""
    return unpacked(parts.read(end), BITS, 1, PLACES).T


def read_scheme(options: Mapping[str, Any]) -> Awq:
    """Return the scheme with the options of config.json's quantization_config. Raises ModelError."""
    read = Options("awq", options)
    read.one_of("bits", (BITS,), read.get("w_bit"))
    read.one_of("version", ("GEMM", "gemm"), "gemm")
    read.one_of("format", ("gemm",), "gemm")
    read.one_of("pack_dtype", ("int32",), "int32")
    read.one_of("zero_point", (True,), True)
    read.refuse("rotation", "adapter", "activation")
    size = read.group_size("group_size" if read.get("group_size") is not None else "q_group_size")
    read.warn_of_others((*HARMLESS, *OWN, "w_bit", "q_group_size"))
    return Awq(size)
