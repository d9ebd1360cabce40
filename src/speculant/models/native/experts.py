"""Layers with experts in native programs: a router, and a linear layer whose rows each use some of many matrices.

scores   the router's result                        [T, count]
gated    activation(gate) * up of each pair         [T * used, size]
results  each pair's result                         [T * used, hidden]

A pair is a row and one of its experts. The kernels select the pairs; csrc/experts.h describes their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels import Activation, Code, Flag, Op, Weight
from speculant.models.description import Experts
from speculant.models.native.ops import gating, linear, make_op
from speculant.models.weights.reader import WeightReader


def expert_matrices(of: Experts) -> list[list[str]]:
    """Return the names of all experts' gates, those of their matrices up, and down, in the module `mlp`."""
    return [
        [f"experts.{index}.{matrix}.weight" for index in range(of.count)]
        for matrix in ("gate_proj", "up_proj", "down_proj")
    ]


@dataclass(frozen=True)
class ExpertMatrices:
    """A matrix of each expert, all of the same type and shape, and without an order of inputs."""

    weights: Sequence[Weight]

    def __post_init__(self) -> None:
        types = {weight.type.name.lower() for weight in self.weights}
        if len(types) > 1:
            raise ModelError(
                f"the experts of a layer are stored in different types ({', '.join(sorted(types))}), which is not"
                " implemented",
                "use a file whose experts have one type.",
            )

    @cached_property
    def addresses(self) -> Tensor:
        """The address of each matrix."""
        return torch.tensor([weight.address for weight in self.weights], dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """The bytes of all."""
        return sum(weight.memory.numel() for weight in self.weights)


@dataclass(frozen=True)
class PackedExperts:
    """The weights of a layer's router and experts. Biases are float32, by expert; None = it has none.

    The router is never rounded, because its scores decide which experts are used. inner: gate and up interleaved, or
    one after the other if their types differ.
    """

    of: Experts
    router: Weight
    router_bias: Tensor | None
    inner: Sequence[ExpertMatrices]
    inner_bias: Tensor | None  # [count, 2, size]
    down: ExpertMatrices
    down_bias: Tensor | None  # [count, hidden]

    @classmethod
    def read(cls, of: Experts, mlp: WeightReader) -> PackedExperts:
        """Read and pack the weights, one expert after the other."""
        inner, down, biases = list[tuple[Weight, ...]](), list[Weight](), list[tuple[Tensor, Tensor]]()
        router = mlp.unrounded().matrix("router.weight")
        experts = mlp.unified(*expert_matrices(of))
        for index in range(of.count):
            one = experts.inside(f"experts.{index}.")
            inner.append(one.interleaved("gate_proj.weight", "up_proj.weight"))
            down.append(one.matrix("down_proj.weight"))
            if of.bias:
                biases.append((one.vector("gate_proj.bias", "up_proj.bias"), one.vector("down_proj.bias")))
        inner_bias, down_bias = (torch.stack(each) for each in zip(*biases, strict=True)) if biases else (None, None)
        return cls(
            of, router, mlp.vector("router.bias") if of.bias else None,
            [ExpertMatrices(each) for each in zip(*inner, strict=True)], inner_bias, ExpertMatrices(down), down_bias,
        )  # fmt: skip

    @property
    def apart(self) -> bool:
        """Whether gates are computed separately, because their type differs."""
        return len(self.inner) > 1

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes a pass of one row reads. Several rows read those of all experts that they use."""
        return self.router.memory.numel() + self._expert_bytes * self.of.used // self.of.count

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices."""
        return self.router.memory.numel() + self._expert_bytes

    @property
    def _expert_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.inner, self.down))

    def computing(
        self, source: Tensor, scores: Tensor, gated: Tensor, gates: Tensor | None, results: Tensor
    ) -> Iterator[Op]:
        """Yield the operations that select each row's experts and compute their results from `source` [T, hidden]."""
        of, flags = self.of, Flag.RENORMALISE if self.of.renormalise else Flag.NONE
        scored = linear(self.router, source, scores, self.router_bias)
        scored.stride = of.count
        yield scored
        yield make_op(Code.ROUTE, n=of.count, source=scores, used=of.used, flags=flags)
        if not self.apart:
            yield self._multiplying(
                self.inner[0], source, gated, self.inner_bias, Flag.GATED | Flag.GATHER, **self._activation
            )
        else:
            assert gates is not None
            yield from self._apart(source, gated, gates)
        yield self._multiplying(self.down, gated, results, self.down_bias)

    def _apart(self, source: Tensor, gated: Tensor, gates: Tensor) -> Iterator[Op]:
        biases = (None, None) if self.inner_bias is None else self._apart_biases
        for matrices, out, bias in zip(self.inner, (gates, gated), biases, strict=True):
            yield self._multiplying(matrices, source, out, bias, Flag.GATHER)
        made = gating(gates, gated, self.of.used * self.of.size, Activation.NONE)
        for name, value in self._activation.items():
            setattr(made, name, value)
        yield made

    @cached_property
    def _apart_biases(self) -> tuple[Tensor, Tensor]:
        assert self.inner_bias is not None
        gate, up = self.inner_bias.view(self.of.count, 2, -1).unbind(1)
        return gate.contiguous(), up.contiguous()

    def combining(self, results: Tensor, out: Tensor, flags: Flag = Flag.NONE, factor: float = 1.0) -> Op:
        """Return the operation out (+)= factor * the weighted sum of each row's results."""
        return make_op(
            Code.COMBINE, n=out.shape[1], source=results, out=out, used=self.of.used, flags=flags, factor=factor
        )

    @property
    def _activation(self) -> dict[str, float]:
        clamped = self.of.clamped
        if clamped is None:
            return {"activation": Activation[self.of.activation.upper()]}
        return {"activation": Activation.CLAMPED, "factor": clamped.gain, "softcap": clamped.limit}

    def _multiplying(
        self, matrices: ExpertMatrices, source: Tensor, out: Tensor, bias: Tensor | None, flags: Flag = Flag.NONE,
        **activation: float,
    ) -> Op:  # fmt: skip
        """Return the operation that multiplies each pair by the matrix of its expert."""
        one = matrices.weights[0]
        made = make_op(
            Code.EXPERTS, one.type, n=one.n, k=one.k, weight=matrices.addresses, source=source, out=out, bias=bias,
            used=self.of.used, flags=flags, **activation,
        )  # fmt: skip
        made.has.matrix = min(weight.memory.numel() for weight in matrices.weights)
        return made
