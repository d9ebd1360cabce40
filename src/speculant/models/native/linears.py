"""Matrices beside a model's own (models/linears.py) on the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.kernels.native import Kernels, Op, Pass, Type
from speculant.models.native.program import linear

FEWEST_ROWS = 8  # capacity at first


class NativeLinears:
    """See `Linears`. A row's result depends on that row alone, bit for bit."""

    def __init__(self, kernels: Kernels, type_: Type, matrices: Sequence[Tensor], biases: Tensor | None) -> None:
        self._kernels, self._weights = kernels, [kernels.pack(type_, matrix) for matrix in matrices]
        self._biases = None if biases is None else biases.float().contiguous()
        self._take_room(FEWEST_ROWS)

    def _take_room(self, rows: int) -> None:
        count, (n, k) = len(self._weights), (self._weights[0].n, self._weights[0].k)
        self._x, self._out = torch.empty(count, rows, k), torch.empty(count, rows, n)
        biases = [None] * count if self._biases is None else [*self._biases]
        self._ops = (Op * count)(*map(linear, self._weights, self._x, self._out, biases))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linears`; float32."""
        count, rows = x.shape[:2]
        if rows > self._x.shape[1]:
            self._take_room(max(rows, 2 * self._x.shape[1]))
        self._x[:count, :rows] = x
        self._kernels.run((Op * count).from_buffer(self._ops), Pass(rows=rows))
        return self._out[:count, :rows].clone()
