"""Which keys each row of a flat batch may see, and attention over them.

keys of one sequence    [ committed context | rows of this pass: chain, then draft nodes ]
a chain row sees        everything up to and including itself
a draft node sees       the chain, its own ancestors and itself; never a cousin

Attention that is not causal has other masks: see `Attention.ahead`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speculant.cache.base import KVStorage, by_length, first_seen
from speculant.kernels.reference import attend
from speculant.models.base import Batch, Segment
from speculant.models.description import Attention, DecoderConfig, Layer
from speculant.tree import ancestors_of, ids


class Attend(Protocol):
    """Where keys and values are, and which of them each row sees.

    Layers compute queries, keys and values the same way in passes with a cache and in training.
    """

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with a layer's queries [..., heads, head_dim]; return a result of the same shape.

        The keys and values [..., kv_heads, head_dim] are those of the same rows. A layer that reads another layer's
        keys and values gives those; see `Sharing`. sinks [heads]; None = it has none.
        """
        ...


class Sharing:
    """Calls `attend`; layers without keys and values of their own get those of the layer that they read."""

    def __init__(self, attend: Attend, layers: Sequence[Layer]) -> None:
        self._attend = attend
        self._read = {layer.attention.shares for layer in layers}
        self._kept = dict[int, tuple[Tensor, Tensor]]()

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """See `Attend`. A layer that reads another layer's keys passes empty ones [..., 0, head_dim]."""
        if of.shares is not None:
            key, value = self._kept[of.shares]
        elif layer in self._read:
            self._kept[layer] = key, value
        return self._attend(layer, of, query, key, value, sinks)


Kind = tuple[int | None, int, bool, bool]  # window, heads per key head, ahead, fixed window: layers with equal masks


@dataclass(frozen=True)
class StoredKeys:
    """Attention of a flat batch over the keys and values of a storage, to which it adds its own.

    Rows are [T, heads, head_dim]. Every layer uses the slots and the masks of its own sliding window. Keys that no row
    of a pass sees are not read.
    """

    batch: Batch
    storage: KVStorage
    groups: dict[int | None, int]  # window -> the group of layers whose slots are used
    slots: dict[int | None, list[Tensor | slice]]  # window -> per segment, the slots of its keys; see `context_slots`
    masks: dict[Kind, list[Tensor | None]]  # -> per segment [groups * rows, keys], or None = all visible

    @classmethod
    def build(cls, batch: Batch, storage: KVStorage, config: DecoderConfig, dtype: torch.dtype) -> StoredKeys:
        """Build the masks for every sliding window of the layers (None = no window).

        A mask is added to the scores, so it holds 0 and -inf in the model's dtype. It is repeated for
        the query heads that share a key head.
        """
        groups = groups_of(config, batch)
        slots = {window: context_slots(batch, group, window) for window, group in groups.items()}
        kinds = {_kind(layer.attention): layer.attention for layer in config.layers}
        masks = {kind: _segment_masks(batch, of, dtype) for kind, of in kinds.items()}
        return cls(batch, storage, groups, slots, masks)

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """See `Attend`. Heads that share a key head are folded into rows, so keys and values are not repeated."""
        storage, segments, masks = self.storage, self.batch.segments, self.masks[_kind(of)]
        if of.shares is None:
            storage.write(layer, self.batch.slots_of(self.groups[of.window]), key, value)
        context = self.slots[of.window]
        if len(segments) == 1:
            return _attend_one(of, query, *storage.read(layer, context[0]), masks[0], sinks)
        parts = query.split_with_sizes([segment.num_rows for segment in segments])
        return torch.cat(
            [
                _attend_one(of, rows, *storage.read(layer, slots), mask, sinks)
                for slots, rows, mask in zip(context, parts, masks, strict=True)
            ]
        )


def groups_of(config: DecoderConfig, batch: Batch) -> dict[int | None, int]:
    """Return the group of layers whose slots in a batch are used, for each sliding window of a decoder's layers."""
    windows = by_length(layer.attention.window for layer in config.layers)
    return {window: index if batch.num_groups > 1 else 0 for index, window in enumerate(windows)}


def _kind(of: Attention) -> Kind:
    return of.window, of.groups, of.ahead, of.fixed_window


def _attend_one(
    of: Attention, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    n, heads, dim = query.shape
    folded = query.view(n, of.kv_heads, of.groups, dim).permute(1, 2, 0, 3).reshape(of.kv_heads, of.groups * n, dim)
    if sinks is not None:
        sinks = sinks.view(of.kv_heads, of.groups, 1).expand(-1, -1, n).reshape(of.kv_heads, -1, 1)
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    out = attend(folded, keys, values, mask, of.score_scale, of.softcap, sinks)
    return out.view(of.kv_heads, of.groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)


def context_slots(batch: Batch, group: int = 0, window: int | None = None) -> list[Tensor | slice]:
    """Return, for each segment, the slots int64 of its positions that rows see, in order, on the batch's device.

    These are the positions from the first one that the segment's first row sees to the end. A sequence that lies in one
    block has a slice, which a storage reads without a copy.
    """
    size, device, tables = batch.block_size, batch.positions.device, array("q")
    parts = [_table_of(segment, group, batch.num_groups) for segment in batch.segments]
    for table in parts:
        if len(table) > 1:
            tables.extend(table)
    every = (ids(tables).to(device)[:, None] * size + torch.arange(size, device=device)).flatten()
    slots, first = list[Tensor | slice](), 0
    for segment, table in zip(batch.segments, parts, strict=True):
        seen = first_seen(window, segment.start)
        if len(table) > 1:
            slots.append(every[first + seen : first + segment.end])
            first += len(table) * size
        else:
            slots.append(slice(table[0] * size + seen, table[0] * size + segment.end))
    return slots


def _table_of(segment: Segment, group: int, num_groups: int) -> array[int]:
    """Return the part of a segment's block table that belongs to a group of layers."""
    if num_groups == 1:
        return segment.table
    count = len(segment.table) // num_groups
    return segment.table[group * count : (group + 1) * count]


def _segment_masks(batch: Batch, of: Attention, dtype: torch.dtype) -> list[Tensor | None]:
    masks, first = [], 0
    for segment in batch.segments:
        positions = batch.positions[first : first + segment.num_rows]
        masks.append(_segment_mask(segment, positions, of, dtype))
        first += segment.num_rows
    return masks


def _segment_mask(segment: Segment, positions: Tensor, of: Attention, dtype: torch.dtype) -> Tensor | None:
    if segment.num_rows == 1:  # it sees all the keys that are read
        return None
    seen = first_seen(of.window, segment.start)  # by the first row
    visible = visible_keys(segment, positions, None if of.fixed_window else of.window)[:, seen:]
    if of.ahead:
        visible[:, segment.start - seen :].logical_or_(torch.ones_like(visible[:, segment.start - seen :]).triu())
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat(of.groups, 1)


def visible_keys(segment: Segment, positions: Tensor, window: int | None) -> Tensor:
    """Return the boolean mask [rows, keys] of one sequence: True where a row sees a key.

    positions [rows] are the rows' positions; with a sliding window a row sees the last `window`
    positions, itself included, counted along its own path.
    """
    start, end, device = segment.start, segment.end, positions.device
    mask = torch.ones(segment.num_rows, end, dtype=torch.bool, device=device).tril(start)
    if not segment.is_chain:
        chain = segment.num_committed
        mask[chain:, start + chain :] = ancestors_of(segment.parents).to(device)
    if window is not None:
        key_positions = torch.cat([torch.arange(start, device=device), positions])
        mask &= key_positions[None, :] > positions[:, None] - window
    return mask
