"""Inputs of layers by token in native programs; see `TokenInputs`.

embedded   the input embeddings                          [T, hidden]
inputs     a layer's inputs                              [T, size]
projected  a term that is added to them, or a factor     [T, size]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from speculant.kernels import Activation, Flag, Op, Weight
from speculant.models.description import TokenInputs
from speculant.models.native.norms import PackedNorm, normalising
from speculant.models.native.ops import embedding, gating, linear
from speculant.models.sizes import TOKEN_TABLE
from speculant.models.weights.reader import WeightReader


@dataclass(frozen=True)
class PackedInputs:
    """The weights of a layer's inputs by token. The table is never rounded."""

    of: TokenInputs
    table: Weight
    projection: Weight
    norm: PackedNorm
    gate: Weight
    out: Weight
    output_norm: PackedNorm

    @classmethod
    def read(cls, of: TokenInputs | None, inputs: WeightReader) -> PackedInputs | None:
        """Read and pack the weights; None = the layer has none."""
        if of is None:
            return None
        norm, output_norm = (PackedNorm.read(of.norm, inputs, name) for name in ("norm", "output_norm"))
        assert norm is not None
        assert output_norm is not None
        return cls(
            of=of,
            table=inputs.unrounded().matrix(TOKEN_TABLE),
            projection=inputs.matrix("projection.weight"),
            norm=norm,
            gate=inputs.matrix("gate_proj.weight"),
            out=inputs.matrix("out_proj.weight"),
            output_norm=output_norm,
        )

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """All its matrices but the table."""
        return (self.projection, self.gate, self.out)


def adding_inputs(
    layer: PackedInputs, x: Tensor, y: Tensor, embedded: Tensor, inputs: Tensor, projected: Tensor
) -> Iterator[Op]:
    """Yield the operations that add a layer's inputs to x; y is scratch memory."""
    of = layer.of
    yield embedding(layer.table, inputs, of.table_factor * of.factor, flags=Flag.TOKENS)
    yield linear(layer.projection, embedded, projected, factor=of.projection_factor)
    yield normalising(layer.norm, projected, inputs, Flag.ADD, factor=of.factor)
    yield linear(layer.gate, x, projected)
    yield gating(projected, inputs, of.size, Activation[of.activation.upper()])
    yield linear(layer.out, inputs, y)
    yield normalising(layer.output_norm, y, x, Flag.ADD)
