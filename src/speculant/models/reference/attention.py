"""Which keys each row of a flat batch may see, and attention over them.

keys of one sequence    [ committed context | rows of this pass: chain, then draft nodes ]
a chain row sees        everything up to and including itself
a draft node sees       the chain, its own ancestors and itself; never a cousin

Attention that is not causal has other masks: see `Attention.ahead`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speculant.cache import KVStorage, by_length, first_seen
from speculant.kernels import attend
from speculant.models.base import Batch, Segment
from speculant.models.description import Attention, DistanceBias, Layer
from speculant.models.distances import buckets_of
from speculant.tree import ancestors_of, ids


class Learned(NamedTuple):
    """The parameters of a layer's scores besides queries and keys; None = it has none."""

    sinks: Tensor | None = None  # [heads]
    distances: Tensor | None = None  # [buckets, heads], see `DistanceBias`


class Attend(Protocol):
    """Where keys and values are, and which of them each row sees.

    Layers compute queries, keys and values the same way in passes with a cache and in training.
    """

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """Attend with a layer's queries [..., heads, head_dim]; return a result of the same shape.

        The keys and values [..., kv_heads, head_dim] are those of the same rows. A layer that reads another layer's
        keys and values gives those, and a layer that shares a table of distances gives that; see `Sharing`. Attention
        over a source gives none.
        """
        ...


class Sharing:
    """Calls `attend`; layers without keys, values or distances of their own get those of the layer that they read."""

    def __init__(self, attend: Attend, layers: Sequence[Layer]) -> None:
        self._attend = attend
        self._read = {layer.attention.shares for layer in layers}
        self._kept = dict[int, tuple[Tensor, Tensor]]()
        self._distances = dict[int, Tensor]()  # tables by layer

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """See `Attend`. A layer that reads another layer's keys passes empty ones [..., 0, head_dim]."""
        if of.shares is not None:
            key, value = self._kept[of.shares]
        elif layer in self._read:
            self._kept[layer] = key, value
        if learned.distances is not None:
            self._distances[layer] = learned.distances
        elif of.distances and of.distances.shares is not None:
            learned = learned._replace(distances=self._distances[of.distances.shares])
        return self._attend(layer, of, query, key, value, learned)


def distance_scores(learned: Learned, buckets: Tensor) -> Tensor:
    """Return what is added to scores [heads, rows, keys], by the buckets [rows, keys] of distances."""
    assert learned.distances is not None
    return learned.distances[buckets].permute(2, 0, 1)


# Window, heads per key head, ahead, fixed window, distances, source: layers of one kind see the same keys.
Kind = tuple[int | None, int, bool, bool, DistanceBias | None, bool]


class Seen(NamedTuple):
    """The keys that one segment's rows see in layers of one kind."""

    slots: Tensor | slice  # see `context_slots`
    mask: Tensor | None = None  # [groups * rows, keys]; None = all visible
    buckets: Tensor | None = None  # [rows, keys], of the distances; None = they add nothing


@dataclass(frozen=True)
class StoredKeys:
    """Attention of a flat batch over the keys and values of a storage, to which it adds its own.

    Rows are [T, heads, head_dim]. Every layer uses the slots and the masks of its own sliding window. Keys that no row
    of a pass sees are not read.
    """

    batch: Batch
    storage: KVStorage
    groups: dict[int | None, int]  # window -> the group of layers whose slots are used
    seen: dict[Kind, list[Seen]]  # for each segment

    @classmethod
    def build(cls, batch: Batch, storage: KVStorage, layers: Sequence[Layer], dtype: torch.dtype) -> StoredKeys:
        """Build the masks for every sliding window of the layers (None = no window).

        A mask is added to the scores, so it holds 0 and -inf in the model's dtype. It is repeated for
        the query heads that share a key head.
        """
        groups = groups_of(layers, batch)
        slots = {window: context_slots(batch, group, window) for window, group in groups.items()}
        kinds = {_kind(of): of for layer in layers for of in (layer.attention, layer.cross) if of}
        seen = {
            kind: _of_sources(batch) if of.source else _of_segments(batch, of, slots[of.window], dtype)
            for kind, of in kinds.items()
        }
        return cls(batch, storage, groups, seen)

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """See `Attend`. Heads that share a key head are folded into rows, so keys and values are not repeated."""
        storage, segments, seen = self.storage, self.batch.segments, self.seen[_kind(of)]
        if of.shares is None and not of.source:
            storage.write(layer, self.batch.slots_of(self.groups[of.window]), key, value)
        parts = [query] if len(segments) == 1 else query.split_with_sizes([each.num_rows for each in segments])
        out = [
            _attend_one(of, rows, *storage.read(layer, each.slots), each, learned)
            for each, rows in zip(seen, parts, strict=True)
        ]
        return out[0] if len(out) == 1 else torch.cat(out)


def groups_of(layers: Sequence[Layer], batch: Batch) -> dict[int | None, int]:
    """Return the group of layers whose slots in a batch are used, for each sliding window of layers."""
    windows = by_length(layer.attention.window for layer in layers)
    return {window: index if batch.num_groups > 1 else 0 for index, window in enumerate(windows)}


def _kind(of: Attention) -> Kind:
    distances = of.distances and replace(of.distances, shares=None)
    return of.window, of.groups, of.ahead, of.fixed_window, distances, of.source


def _attend_one(of: Attention, query: Tensor, keys: Tensor, values: Tensor, seen: Seen, learned: Learned) -> Tensor:
    n, heads, dim = query.shape
    folded = query.view(n, of.kv_heads, of.groups, dim).permute(1, 2, 0, 3).reshape(of.kv_heads, of.groups * n, dim)
    sinks, mask = learned.sinks, seen.mask
    if sinks is not None:
        sinks = sinks.view(of.kv_heads, of.groups, 1).expand(-1, -1, n).reshape(of.kv_heads, -1, 1)
    if seen.buckets is not None:
        added = distance_scores(learned, seen.buckets).reshape(of.kv_heads, of.groups * n, -1)
        mask = added if mask is None else added + mask
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    out = attend(folded, keys, values, mask, of.score_scale, of.softcap, sinks)
    return out.view(of.kv_heads, of.groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)


def _of_sources(batch: Batch) -> list[Seen]:
    """Return the keys of attention over sources: all of each segment's source."""
    sources = [Segment(each.seq_id, 0, each.source_length, each.source_table) for each in batch.segments]
    return [Seen(slots) for slots in context_slots(replace(batch, segments=tuple(sources)))]


def _of_segments(batch: Batch, of: Attention, slots: Sequence[Tensor | slice], dtype: torch.dtype) -> list[Seen]:
    """Return the keys that each segment's rows see in self-attention."""
    seen, parts = list[Seen](), batch.positions.split_with_sizes([segment.num_rows for segment in batch.segments])
    for segment, positions, own in zip(batch.segments, parts, slots, strict=True):
        buckets = _buckets(segment, positions, of.distances, of.window) if of.distances else None
        seen.append(Seen(own, _segment_mask(segment, positions, of, dtype), buckets))
    return seen


def _buckets(segment: Segment, positions: Tensor, of: DistanceBias, window: int | None) -> Tensor:
    """Return the buckets [rows, keys] of the distances from one sequence's rows to the keys that they read."""
    keys = key_positions(segment, positions)[first_seen(window, segment.start) :]
    return buckets_of(of, positions[:, None] - keys)


def key_positions(segment: Segment, positions: Tensor) -> Tensor:
    """Return the positions of one sequence's keys, from those of its rows [rows]."""
    return torch.cat([torch.arange(segment.start, device=positions.device), positions])


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
        mask &= key_positions(segment, positions)[None, :] > positions[:, None] - window
    return mask
