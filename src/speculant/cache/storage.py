"""The memory of a cache: tensors with one slot per position, for every layer.

Storage is [layers, 2, slots, kv_heads, head_dim]; 2 = keys and values. A kernel that reads block tables gets a layer's
whole storage and computes the slots itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, Moves
from speculant.errors import CapacityError
from speculant.tree import ids


class TensorStorage:
    """A `KVStorage` in this process: tensors on the shape's device, allocated once."""

    def __init__(self, shape: CacheShape, num_slots: int, fix: str) -> None:
        """Allocate; `fix` is the advice in a CapacityError."""
        size = (shape.num_layers, 2, num_slots, shape.num_kv_heads, shape.head_dim)
        try:
            self._data = torch.empty(size, dtype=shape.dtype, device=shape.device)
        except RuntimeError as error:
            needed = num_slots * shape.bytes_per_token / 2**30
            raise CapacityError(
                f"the KV cache needs {needed:.2f} GiB for {num_slots} positions and the allocation failed ({error})",
                fix,
            ) from error
        self._layers = [(both[0], both[1]) for both in self._data]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVStorage.write`."""
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored.index_copy_(0, slots, new)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """See `KVStorage.read`."""
        keys, values = self._layers[layer]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        return keys.index_select(0, slots), values.index_select(0, slots)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVStorage.layer`."""
        return self._layers[layer]

    def move(self, moves: Moves) -> None:
        """See `KVStorage.move`; the gather makes a copy, so sources and targets may overlap."""
        sources, targets = (ids(slots).to(self._data.device) for slots in (moves.sources, moves.targets))
        self._data.index_copy_(2, targets, self._data.index_select(2, sources))
