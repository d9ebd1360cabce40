"""The matrices of heads, multiplied on the kernels of the model that the heads belong to.

torch has threads of its own, which spin for a while after an operation. A native pass that follows takes up to half as
long again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from speculant.models.base import CausalLM


class Linears(Protocol):
    """y = W x + b of several matrices side by side."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [count, r, n], by the first `count` matrices, for [count, r, k]."""
        ...


@runtime_checkable
class LinearHost(Protocol):
    """A `CausalLM` that multiplies by further matrices with kernels of its own."""

    def linears(self, matrices: Sequence[Tensor], biases: Tensor | None) -> Linears:
        """See `linears_of`; results are float32."""
        ...


@dataclass(frozen=True)
class TorchLinears:
    """In plain PyTorch: weight [h, n, k] and bias [h, n] or None; results are of their type."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linears`."""
        count, x = len(x), x.to(self.weight.dtype)
        matrices = self.weight[:count].mT
        return torch.bmm(x, matrices) if self.bias is None else torch.baddbmm(self.bias[:count, None], x, matrices)


def linears_of(model: CausalLM, matrices: Sequence[Tensor], biases: Tensor | None = None) -> Linears:
    """Return the `Linears` of matrices [n, k] of one shape and of the model's dtype, and of biases [h, n]."""
    if isinstance(model, LinearHost):
        return model.linears(matrices, biases)
    return TorchLinears(torch.stack(tuple(matrices)), biases)
