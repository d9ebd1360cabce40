"""The memory of a cache: tensors with one slot per position, for every layer.

Each group of layers has a storage [layers, 2, slots, kv_heads, head_dim]; 2 = keys and values. A kernel that reads
block tables gets a layer's whole storage and computes the slots itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, LayerGroup, Moves
from speculant.errors import CapacityError
from speculant.tree import ids


class TensorStorage:
    """A `KVStorage` in this process: tensors on the shape's device, allocated once."""

    def __init__(self, shape: CacheShape, num_slots: int | Sequence[int], fix: str) -> None:
        """Allocate slots for each group of layers, or as many for all layers; `fix` is the advice in a CapacityError.

        With one number all layers are one group, which keeps all positions.
        """
        every = LayerGroup(None, tuple(range(shape.num_layers)))
        groups, counts = ((every,), [num_slots]) if isinstance(num_slots, int) else (shape.groups, num_slots)
        sizes = [
            (len(group.layers), 2, count, shape.num_kv_heads, shape.head_dim)
            for group, count in zip(groups, counts, strict=True)
        ]
        try:
            self._data = [torch.empty(size, dtype=shape.dtype, device=shape.device) for size in sizes]
        except RuntimeError as error:
            needed = sum(count * shape.bytes_of(size[0]) for count, size in zip(counts, sizes, strict=True)) / 2**30
            raise CapacityError(
                f"the KV cache needs {needed:.2f} GiB for {counts[0]} positions and the allocation failed ({error})",
                fix,
            ) from error
        layers = {
            layer: (both[0], both[1])
            for group, data in zip(groups, self._data, strict=True)
            for layer, both in zip(group.layers, data, strict=True)
        }
        self._layers = [layers[layer] for layer in range(shape.num_layers)]

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
        for data, own in zip(self._data, moves.by_group(), strict=False):
            if own.sources:
                data.index_copy_(2, self._ids(own.targets), data.index_select(2, self._ids(own.sources)))

    def _ids(self, slots: Sequence[int]) -> Tensor:
        return ids(slots).to(self._data[0].device)
