"""GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it: weights scale * (q - zero) of n outputs and k inputs.

qweight   int32 [k bits / 32, n]       integers q; a word has adjacent ones of a column, the lowest bits first
qzeros    int32 [groups, n bits / 32]  zero points, adjacent ones of a row; the format "gptq" stores them minus 1,
                                       "gptq_v2" as they are. With `sym` all are 2^(bits - 1), which tells the format
scales    floats [groups, n]
g_idx     int32 [k]                    the group of each input; it may be missing if a group's inputs are adjacent

The quantizer may sort the inputs before it forms groups (`desc_act`). Then the inputs of a group are not adjacent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.models.weights.formats import BELONGS, HARMLESS, Options
from speculant.models.weights.scaled import SCALES_OF_16, WORD, integer_matrix, read_groups, unpacked
from speculant.models.weights.source import JoinedMatrix
from speculant.models.weights.tensors import ModuleParts, Scheme

logger = logging.getLogger(__name__)

QWEIGHT, QZEROS, SCALES, G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Gptq(Scheme):
    """See `Scheme`. bits, size: of modules that `dynamic` does not change; size -1 = one group.

    add_one: whether the stored zeros are one too low, as config.json says. symmetric: whether all are 2^(bits - 1).
    """

    bits: int
    size: int
    add_one: bool
    needs_g_idx: bool
    dynamic: bool
    symmetric: bool
    marks = (QWEIGHT,)
    parts = (QWEIGHT, QZEROS, SCALES, G_IDX)
    _said: set[str] = field(default_factory=set, repr=False, compare=False)

    def _say_other_format(self, parts: ModuleParts) -> None:
        """Say once that the zero points have the format that config.json does not name."""
        if not self._said:
            named, other = ("gptq", "gptq_v2") if self.add_one else ("gptq_v2", "gptq")
            logger.warning(
                "%s: the zero points are stored as in checkpoint_format %s, and config.json says %s. They are read as"
                " they are stored: with sym, all are in the middle of the integers.",
                parts.files.place.name, other, named,
            )  # fmt: skip
            self._said.add(other)

    @override
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        name, shape, zeros = parts.module, parts.shape(QWEIGHT), parts.shape(QZEROS)
        if len(shape) != 2 or len(zeros) != 2 or 0 in shape + zeros:
            raise parts.error(f"{name} has qweight {list(shape)} and qzeros {list(zeros)}, which are not matrices")
        (words, n), (groups, packed) = shape, zeros
        bits = packed * WORD // n if self.dynamic else self.bits
        if bits not in BITS or packed * WORD != n * bits:
            raise parts.error(
                f"{name} has qweight {list(shape)} and qzeros {list(zeros)}, which do not fit integers of"
                f" {self.bits} bits",
                "use a checkpoint with 2, 4 or 8 bits, or download it again.",
            )
        k = words * WORD // bits
        parts.check(QWEIGHT, ["I32"], shape)
        parts.check(QZEROS, ["I32"], zeros)
        parts.check(SCALES, SCALES_OF_16, (groups, n))
        if self.needs_g_idx or parts.has(G_IDX):
            parts.check(G_IDX, ["I32", "I64"], (k,))
        size = self._size(parts, k, groups)
        return integer_matrix(
            "GPTQ", parts, (n, k), bits, SCALES, Tensor.t, lambda: unpacked(parts.read(QWEIGHT), bits, axis=0).T,
            lambda: self._zeros(parts, bits).T, read_groups(parts, G_IDX, k, size),
        )  # fmt: skip

    def _zeros(self, parts: ModuleParts, bits: int) -> np.ndarray:
        """Read the zero points, uint8 [groups, n]. Raises ModelError if `sym` contradicts them."""
        words = parts.read(QZEROS).numpy().view(np.uint32)
        one = sum(1 << shift for shift in range(0, WORD, bits))
        add_one, middle = self.add_one, one << bits - 1
        if self.symmetric and not bool((words == middle - one * add_one).all()):
            add_one = not add_one
            if not bool((words == middle - one * add_one).all()):
                raise parts.error(
                    f"{parts.module}{QZEROS} has other zero points than {2 ** (bits - 1)}, and config.json"
                    " says that the integers are symmetric",
                    "use the config.json that belongs to these weights: one with sym = false has any zero points.",
                )
            self._say_other_format(parts)
        if add_one:  # to each integer of a word, with carries: they undo the borrows of the subtraction
            words = words + np.uint32(one)
        return unpacked(torch.from_numpy(words.view(np.int32)), bits, axis=1)

    def _size(self, parts: ModuleParts, k: int, groups: int) -> int:
        """Return the inputs of a group. Raises ModelError for another number of groups than config.json says."""
        size = k if self.size == -1 else self.size
        if -(-k // size) == groups:
            return size
        if self.dynamic and k % groups == 0:
            return k // groups
        raise parts.error(
            f"{parts.module} has {groups} groups, and {k} inputs in groups of {size} are {-(-k // size)}",
            BELONGS,
        )


def read_scheme(options: Mapping[str, Any]) -> Gptq:
    """Return the scheme with the options of config.json's quantization_config. Raises ModelError."""
    read = Options("gptq", options)
    form = read.one_of("checkpoint_format", ("gptq", "gptq_v2"), read.get("format", "gptq"))
    read.one_of("format", (form,), form)
    read.one_of("pack_dtype", ("int32",), "int32")
    read.refuse("rotation", "adapter", "activation", "is_marlin_format")
    changed = read.get("dynamic") or {}
    others = changed.values() if isinstance(changed, dict) else ()
    symmetric = read.is_set("sym") and all(each.get("sym", True) is True for each in others if isinstance(each, dict))
    scheme = Gptq(
        read.one_of("bits", BITS), read.group_size(), form == "gptq", read.is_set("desc_act"), bool(changed), symmetric
    )
    read.warn_of_others(HARMLESS)
    return scheme
