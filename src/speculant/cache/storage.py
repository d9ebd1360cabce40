"""The memory of a cache: tensors with one slot per position, for every layer.

Each group of layers has a storage [layers, 2, slots, kv_heads, head_dim] for each shape of its keys; 2 = keys and
values. A layer that reads another's keys has none. A kernel that reads block tables gets a layer's whole storage and
computes the slots itself.

Keys and values in int8 have a scale for each head of a position:

    a head of a position    [ dim int8 | float32 scale ]        number i = scale * int8 i

The scale is max |x| / 127, and x / scale is rounded to the nearest integer, ties to even. A head of zeros has the
scale 0. A head with an infinity or NaN has the scale NaN, so that each result that depends on it is NaN too.
csrc/rows.h rounds in the same way, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache.base import NO_MOVES, SCALE_BYTES, CacheShape, KVStorage, LayerGroup, Moves
from speculant.cache.disk import STATES
from speculant.cache.paged import KVCache
from speculant.errors import CapacityError
from speculant.kernels import empty
from speculant.tree import ids

ROUNDED = torch.int8
LARGEST = 127.0
RECORDS_OF_SEQUENCE = 2  # one of them is written while the other is read
NO_RECORDS, USUAL_RECORDS = (0, 0), (32, 8)
LEAST = 1e-36  # a smaller max |x|, unless it is 0, counts as this: 127 / max |x| must not overflow


class TensorStorage(KVStorage):
    """A storage in this process: tensors on the shape's device, allocated once."""

    def __init__(self, shape: CacheShape, num_slots: int | Sequence[int], fix: str, num_records: int = 0) -> None:
        """Allocate slots for each group of layers, or as many for all layers; `fix` is the advice in a CapacityError.

        With one number all layers are one group, which keeps all positions. num_records: of each layer with a state.
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
            self._data = [empty(size, stored_as, shape.device) for size in sizes]
            wide = torch.promote_types(shape.dtype, torch.float32)
            self._records = {
                layer: empty((num_records, of.size), wide, shape.device)
                for layer, of in enumerate(shape.states) if of
            }  # fmt: skip
        except (OSError, OverflowError, RuntimeError) as error:
            keys = sum(count * shape.bytes_of(of.layers) for count, of in zip(counts, groups, strict=True))
            needed = (keys + num_records * shape.state_bytes) / 2**30
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

    @override
    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored.index_copy_(0, slots, round_heads(new) if self._shape.is_rounded else new.to(stored.dtype))

    @override
    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = (
            stored[slots] if isinstance(slots, slice) else stored.index_select(0, slots)
            for stored in self._layers[layer]
        )
        return self._read(keys), self._read(values)

    @override
    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]

    @override
    def records(self, layer: int) -> Tensor:
        return self._records[layer]

    @override
    def move(self, moves: Moves) -> None:
        parts = moves.by_group()
        for group, data in zip(self._groups, self._data, strict=True):
            own = parts[group] if group < len(parts) else NO_MOVES
            if own.sources:  # the gather makes a copy, so sources and targets may overlap
                data.index_copy_(2, self._ids(own.targets), data.index_select(2, self._ids(own.sources)))

    @override
    def size(self, place: int, slots: Sequence[int]) -> int:
        parts = self._parts(place)
        return len(slots) * sum(each.numel() // each.shape[dim] * each.element_size() for each, dim in parts)

    @override
    def dump(self, place: int, slots: Sequence[int]) -> memoryview:
        parts = [_rows(each, dim, slots).contiguous().view(torch.uint8).flatten() for each, dim in self._parts(place)]
        return torch.cat(parts).cpu().numpy().data

    @override
    def load(self, place: int, slots: Sequence[int], content: memoryview) -> None:
        rest = torch.frombuffer(content, dtype=torch.uint8)
        for each, dim in self._parts(place):
            shape = [*each.shape[:dim], len(slots), *each.shape[dim + 1 :]]
            size = math.prod(shape) * each.element_size()
            own = rest[:size].view(each.dtype).view(shape).to(each.device)
            if isinstance(slots, range):
                _rows(each, dim, slots).copy_(own)
            else:
                each.index_copy_(dim, ids(slots).to(each.device), own)
            rest = rest[size:]

    def _parts(self, place: int) -> list[tuple[Tensor, int]]:
        """Return the memory of a group of layers, or of all records, with the dimension of slots or records."""
        if place == STATES:
            return [(records, 0) for records in self._records.values()]
        return [(data, 2) for group, data in zip(self._groups, self._data, strict=True) if group == place]

    def _read(self, stored: Tensor) -> Tensor:
        """Return stored heads in the model's type."""
        return read_heads(stored, self._shape.dtype) if self._shape.is_rounded else stored.to(self._shape.dtype)

    def _ids(self, slots: Sequence[int]) -> Tensor:
        return ids(slots).to(self._data[0].device)


def _rows(data: Tensor, dim: int, slots: Sequence[int]) -> Tensor:
    """Return slots of a tensor; a view if they are consecutive."""
    if isinstance(slots, range):
        return data.narrow(dim, slots.start, len(slots))
    return data.index_select(dim, ids(slots).to(data.device))


def _alike(shape: CacheShape, groups: Sequence[LayerGroup]) -> dict[tuple[int, int, int], list[int]]:
    """Return the layers that have a storage of their own by group, key heads and dimensions."""
    found = dict[tuple[int, int, int], list[int]]()
    for index, group in enumerate(groups):
        for layer in group.layers:
            heads, dim, shares = shape.layers[layer]
            if shares is None:
                found.setdefault((index, heads, dim), []).append(layer)
    return found


def round_heads(x: Tensor) -> Tensor:
    """Return heads [..., dim] of floats as int8 [..., dim + SCALE_BYTES]; the last bytes are the scale's."""
    wide = x.float()
    bound = wide.new_tensor(LARGEST)  # torch divides in two steps if one operand is a Python number
    largest = wide.abs().amax(-1, keepdim=True)
    finite, most = largest.isfinite(), largest.clamp_min(LEAST)
    numbers = torch.where(finite, (wide * (bound / most)).round(), 0.0).to(ROUNDED)
    scales = torch.where(largest == 0, 0.0, most / bound).masked_fill(~finite, torch.nan)
    return torch.cat((numbers, scales.view(ROUNDED)), dim=-1)


def read_heads(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., dim] of rounded heads [..., dim + SCALE_BYTES] in a type of floats."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[..., :-SCALE_BYTES].to(wide) * scales.to(wide)).to(dtype)


def paged_cache(
    shape: CacheShape,
    num_blocks: int | Sequence[int],
    block_size: int,
    keep_prefixes: bool = True,
    records: tuple[int, int] = USUAL_RECORDS,
) -> KVCache:
    """Make a cache of small blocks; raises CapacityError if the memory can't be allocated.

    num_blocks: of each group of layers, or one number for every group. records: how many a model with states has, and
    how many of them a pass may save for prefixes.
    """
    windows = [group.window for group in shape.groups]
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
    if not shape.states:
        records = NO_RECORDS
    elif not keep_prefixes:
        records = (records[0], 0)
    storage = TensorStorage(shape, [count * block_size for count in counts], "lower kv_memory.", records[0])
    return KVCache(storage, counts, block_size, keep_prefixes, windows, records=records)


def slotted_cache(shape: CacheShape, num_seqs: int, max_len: int) -> KVCache:
    """Make a cache of one block per sequence, whose slots are consecutive; raises CapacityError too.

    It keeps all positions of every layer, even of those with a window, and no prefixes.
    """
    records = (RECORDS_OF_SEQUENCE * (num_seqs + 1), 0) if shape.states else NO_RECORDS
    storage = TensorStorage(shape, num_seqs * max_len, "lower max_num_seqs or max_model_len.", records[0])
    return KVCache(storage, [num_seqs], max_len, keep_prefixes=False, max_len=max_len, records=records)
