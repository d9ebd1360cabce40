"""The memory of a cache: tensors with one slot per position, for every layer.

Each group of layers has a storage [layers, 2, slots, kv_heads, head_dim] for each shape of its keys; 2 = keys and
values. Rounded heads have a scale after their numbers (cache/rounding.py). A layer that reads another's keys has none.
A kernel that reads block tables gets a layer's whole storage and computes the slots itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.base import NO_MOVES, CacheShape, LayerGroup, Moves
from speculant.cache.rounding import read_heads, round_heads
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
        kinds = _alike(shape, groups)
        self._shape, stored_as = shape, shape.stored or shape.dtype
        sizes = [
            (len(layers), 2, counts[group], heads, shape.bytes_of_head(dim) // stored_as.itemsize)
            for (group, heads, dim), layers in kinds.items()
        ]
        try:
            self._data = [torch.empty(size, dtype=stored_as, device=shape.device) for size in sizes]
        except RuntimeError as error:
            needed = sum(count * shape.bytes_of(of.layers) for count, of in zip(counts, groups, strict=True)) / 2**30
            raise CapacityError(
                f"the KV cache needs {needed:.2f} GiB for {counts[0]} positions and the allocation failed ({error})",
                fix,
            ) from error
        stored = {
            layer: (both[0], both[1])
            for layers, data in zip(kinds.values(), self._data, strict=True)
            for layer, both in zip(layers, data, strict=True)
        }
        self._groups = [group for group, _, _ in kinds]  # of the data
        self._layers = [stored[layer if own.shares is None else own.shares] for layer, own in enumerate(shape.layers)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVStorage.write`."""
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored.index_copy_(0, slots, round_heads(new) if self._shape.is_rounded else new.to(stored.dtype))

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """See `KVStorage.read`."""
        keys, values = (
            stored[slots] if isinstance(slots, slice) else stored.index_select(0, slots)
            for stored in self._layers[layer]
        )
        return self._read(keys), self._read(values)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVStorage.layer`."""
        return self._layers[layer]

    def move(self, moves: Moves) -> None:
        """See `KVStorage.move`; the gather makes a copy, so sources and targets may overlap."""
        parts = moves.by_group()
        for group, data in zip(self._groups, self._data, strict=True):
            own = parts[group] if group < len(parts) else NO_MOVES
            if own.sources:
                data.index_copy_(2, self._ids(own.targets), data.index_select(2, self._ids(own.sources)))

    def _read(self, stored: Tensor) -> Tensor:
        """Return stored heads in the model's type."""
        return read_heads(stored, self._shape.dtype) if self._shape.is_rounded else stored.to(self._shape.dtype)

    def _ids(self, slots: Sequence[int]) -> Tensor:
        return ids(slots).to(self._data[0].device)


def _alike(shape: CacheShape, groups: Sequence[LayerGroup]) -> dict[tuple[int, int, int], list[int]]:
    """Return the layers that have a storage of their own by group, key heads and dimensions."""
    found = dict[tuple[int, int, int], list[int]]()
    for index, group in enumerate(groups):
        for layer in group.layers:
            heads, dim, shares = shape.layers[layer]
            if shares is None:
                found.setdefault((index, heads, dim), []).append(layer)
    return found
