"""The memory of a cache: one flat row per position, for every layer.

Storage is [layers, 2, rows, kv_heads, head_dim]; 2 = keys and values. A kernel that walks a block table
gets a layer's storage whole and works out the rows itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculant.cache.base import CacheShape
from speculant.errors import CapacityError


class Storage:
    """Rows of keys and values, allocated once; who owns which row is the cache's business."""

    def __init__(self, shape: CacheShape, rows: int, fix: str) -> None:
        """Allocate; `fix` is what to do about a CapacityError."""
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, shape.head_dim)
        try:
            self._data = torch.empty(size, dtype=shape.dtype, device=shape.device)
        except RuntimeError as error:
            needed = rows * shape.bytes_per_token / 2**30
            raise CapacityError(
                f"the KV cache needs {needed:.2f} GiB for {rows} positions and the allocation failed ({error})", fix
            ) from error
        self._layers = [(both[0], both[1]) for both in self._data]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [rows, kv_heads, head_dim], without copying."""
        return self._layers[layer]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] in rows [T]."""
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored.index_copy_(0, rows, new)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows source [n] to rows target [n] in every layer; they may overlap."""
        self._data[:, :, target] = self._data[:, :, source]
