"""Norms in native programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from speculant.kernels import Code, Flag, Op
from speculant.models.description import Norm
from speculant.models.native.ops import make_op
from speculant.models.weights.reader import WeightReader


class PackedNorm(NamedTuple):
    """The vectors of a norm, in float32. `scale` includes the description's offset."""

    of: Norm
    scale: Tensor
    bias: Tensor | None

    @classmethod
    def read(cls, of: Norm | None, weights: WeightReader, name: str, width: int = 0) -> PackedNorm | None:
        """Read a norm's vectors, which are called name.weight and name.bias; None = the model does not have it.

        width: that of a norm without scales.
        """
        if of is None:
            return None
        scale = weights.vector(f"{name}.weight") if of.scaled else torch.ones(width)
        bias = weights.vector(f"{name}.bias") if of.bias else None
        return cls(of, scale + of.offset if of.offset else scale, bias)

    @property
    def flag(self) -> Flag:
        """The kind of norm."""
        return Flag.CENTRED if self.of.kind == "layer" else Flag.NONE


def normalising(
    norm: PackedNorm, source: Tensor, out: Tensor, flags: Flag = Flag.NONE, *, copy: Tensor | None = None,
    factor: float = 1.0,
) -> Op:  # fmt: skip
    """Return the operation out = norm(source), or out += factor * norm(source) with the flag ADD.

    copy: where `source` is copied to.
    """
    return make_op(
        Code.NORM, n=len(norm.scale), scale=norm.scale, bias=norm.bias, eps=norm.of.eps, source=source, out=out,
        copy=copy, flags=flags | norm.flag, factor=factor,
    )  # fmt: skip
