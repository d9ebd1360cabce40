"""The memory of a cache: tensors with one slot per position, for every layer.

Layers of the same heads have a storage [layers, 2, slots, kv_heads, head_dim]; 2 = keys and values. A kernel that reads block tables gets a layer's
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
        kinds = dict[tuple[int, int], list[int]]()  # the layers of each, those with a storage of their own
        for layer, (heads, dim, shares) in enumerate(shape.layers):
            if shares is None:
                kinds.setdefault((heads, dim), []).append(layer)
        sizes = [(len(layers), 2, num_slots, *kind) for kind, layers in kinds.items()]
        try:
            self._data = [torch.empty(size, dtype=shape.dtype, device=shape.device) for size in sizes]
        except RuntimeError as error:
            needed = num_slots * shape.bytes_per_token / 2**30
            raise CapacityError(
                f"the KV cache needs {needed:.2f} GiB for {num_slots} positions and the allocation failed ({error})",
                fix,
            ) from error
        stored = {
            layer: (both[0], both[1])
            for layers, data in zip(kinds.values(), self._data, strict=True)
            for layer, both in zip(layers, data, strict=True)
        }
        read = [layer if of.shares is None else of.shares for layer, of in enumerate(shape.layers)]
        self._layers = [stored[layer] for layer in read]

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
        sources, targets = (ids(slots).to(self._data[0].device) for slots in (moves.sources, moves.targets))
        for data in self._data:
            data.index_copy_(2, targets, data.index_select(2, sources))
