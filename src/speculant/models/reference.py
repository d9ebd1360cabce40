"""The reference interpreter of a description: torch, differentiable. Training and heads use the same layers.

Parameters have the names of `models/sizes.py`, in every family. Which keys a row of a flat batch sees:

    keys of one sequence    [ committed context | rows of this pass: chain, then draft nodes ]
    a chain row sees        everything up to and including itself
    a draft node sees       the chain, its own ancestors and itself; never a cousin

Attention that is not causal has other masks: see `Attention.ahead`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from speculant.cache import (
    MOST_PENDING,
    NO_RECORD,
    CacheShape,
    KVCache,
    KVStorage,
    StateShape,
    by_length,
    first_seen,
)
from speculant.errors import ConfigError
from speculant.kernels import attend, reference
from speculant.models.base import (
    BackendModel,
    Batch,
    Chain,
    Hidden,
    ModelNeeds,
    RunsPasses,
    Segment,
    check_embeddings,
    check_sources,
    check_taps,
    check_tokens,
)
from speculant.models.description import (
    Attention,
    Clamped,
    DecoderConfig,
    DistanceBias,
    Embedding,
    Encoder,
    Experts,
    Layer,
    Mlp,
    Norm,
    Rope,
    State,
    TokenInputs,
    restart_of,
)
from speculant.models.positions import Rotary, buckets_of, rotation_of, rotations, sinusoids
from speculant.models.sizes import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_CROSS,
    BEFORE_MLP,
    END_ATTENTION,
    END_CROSS,
    END_MLP,
    cache_shape,
    layer_norms,
    learned_positions,
    relative_reads,
    state_shape,
)
from speculant.models.weights.source import WeightSource, read_plain
from speculant.tree import ancestors_of, ids


class Learned(NamedTuple):
    """The parameters of a layer's scores besides queries and keys; None = it has none."""

    sinks: Tensor | None = None  # [heads]
    distances: Tensor | None = None  # [buckets, heads], see `DistanceBias`


class StateInputs(NamedTuple):
    """What rows do to a state: keys and queries [..., n, heads, key_dim], values [..., n, heads, head_dim].

    decay, rate [..., n, heads]: exp(g) and the sigmoid of b, or the factor of S and t; see `State`.
    """

    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor
    query: Tensor


def change(of: State, state: Tensor, row: StateInputs) -> tuple[Tensor, Tensor]:
    """Return a state [..., heads, key_dim, head_dim] after a row, and the row's vector d [..., heads, head_dim]."""
    kept, key = state * row.decay[..., None, None], row.key[..., None]
    known = 0 if of.steps else (kept * key).sum(-2)
    added = (row.value - known) * row.rate[..., None]
    return kept + key * added[..., None, :], added


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


class Recurrence(ABC):
    """Where the states of layers are; as `Attend`, for layers with a `State`. An `Attend` may be one too."""

    @abstractmethod
    def convolve(self, layer: int, of: State, columns: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sums [..., n, width] of the last columns of each row.

        columns [..., n, width] are those of the rows; weight [width, conv].
        """

    @abstractmethod
    def recur(self, layer: int, of: State, rows: StateInputs) -> Tensor:
        """Return the results S^T q [..., n, heads, head_dim] of rows."""


CHUNK = 64  # rows


def change_by_rows(of: State, state: Tensor, rows: StateInputs) -> tuple[Tensor, Tensor]:
    """Return a state [..., heads, key_dim, head_dim] after rows, and their results S^T q [..., n, heads, head_dim].

    All rows at once, for training: the vectors d of a delta rule solve a triangular system (arXiv 2412.06464, section
    3.3). The results round otherwise than those of `change`.
    """
    key, value, query = (each.transpose(-3, -2) for each in (rows.key, rows.value, rows.query))  # [..., heads, n, dim]
    rate, slopes = rows.rate.mT[..., None], rows.decay.mT.clamp(min=torch.finfo(rows.decay.dtype).tiny).log()
    sums = slopes.cumsum(-1)
    later = torch.ones(key.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device).triu(1)
    kept = (sums[..., None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()  # of row j in row i
    since = sums.exp()[..., None]
    added = rate * value
    if not of.steps:
        system = (rate * kept * (key @ key.mT)).tril(-1)
        added = torch.linalg.solve_triangular(
            system, added - rate * since * (key @ state), upper=False, unitriangular=True
        )
    results = since * (query @ state) + (kept * (query @ key.mT)) @ added
    state = since[..., -1:, :] * state + (key * kept[..., -1, :, None]).mT @ added
    return state, results.transpose(-3, -2)


class WholeTexts(Recurrence):
    """Texts [..., n, ...] without a cache."""

    @override
    def convolve(self, layer: int, of: State, columns: Tensor, weight: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(columns, (0, 0, of.conv - 1, 0))
        return torch.nn.functional.conv1d(padded.mT, weight[:, None], groups=of.width).mT

    @override
    def recur(self, layer: int, of: State, rows: StateInputs) -> Tensor:
        *batch, n = rows.query.shape[:-2]
        state, results = rows.query.new_zeros(*batch, of.heads, of.key_dim, of.head_dim), list[Tensor]()
        for first in range(0, n, CHUNK):
            chunk = StateInputs(*(each.narrow(len(batch), first, min(CHUNK, n - first)) for each in rows))
            state, result = change_by_rows(of, state, chunk)
            results.append(result)
        return torch.cat(results, len(batch))


def recurrence_of(attend: Attend) -> Recurrence:
    """Return where the states are. Raises ConfigError if there are none: in training that masks rows of a text."""
    own = attend.within if isinstance(attend, Sharing) else attend
    if not isinstance(own, Recurrence):
        raise ConfigError(
            "this training lets rows of a text see some earlier rows alone, and a layer with a state sees all",
            "train another kind of draft for this model.",
        )
    return own


class Sharing(Attend):
    """Calls `attend`; layers without keys, values or distances of their own get those of the layer that they read."""

    def __init__(self, attend: Attend, layers: Sequence[Layer]) -> None:
        self.within = attend
        self._read = {layer.attention.shares for layer in layers if layer.attention}
        self._kept = dict[int, tuple[Tensor, Tensor]]()
        self._distances = dict[int, Tensor]()  # tables by layer

    @override
    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """A layer that reads another layer's keys passes empty ones [..., 0, head_dim]."""
        if of.shares is not None:
            key, value = self._kept[of.shares]
        elif layer in self._read:
            self._kept[layer] = key, value
        if learned.distances is not None:
            self._distances[layer] = learned.distances
        elif of.distances and of.distances.shares is not None:
            learned = learned._replace(distances=self._distances[of.distances.shares])
        return self.within(layer, of, query, key, value, learned)


def distance_scores(learned: Learned, buckets: Tensor) -> Tensor:
    """Return what is added to scores [heads, rows, keys], by the buckets [rows, keys] of distances."""
    assert learned.distances is not None
    return learned.distances[buckets].permute(2, 0, 1)


# Window, heads per key head, ahead, fixed window, distances, source: layers of one kind see the same keys.
_Kind = tuple[int | None, int, bool, bool, DistanceBias | None, bool]


class Seen(NamedTuple):
    """The keys that one segment's rows see in layers of one kind."""

    slots: Tensor | slice  # see `context_slots`
    mask: Tensor | None = None  # [groups * rows, keys]; None = all visible
    buckets: Tensor | None = None  # [rows, keys], of the distances; None = they add nothing


class Records(NamedTuple):
    """The records of a layer with a state; see `StateShape`."""

    of: StateShape
    data: Tensor  # [records, size]

    def state(self, record: int) -> Tensor:
        """Return a record's state, a view."""
        return self.data[record, : self.of.state]

    def update(self, record: int, position: int) -> Tensor:
        """Return the update of a position, a view."""
        first = self.of.state + position % MOST_PENDING * self.of.update
        return self.data[record, first : first + self.of.update]

    def column(self, record: int, position: int) -> Tensor:
        """Return the column of a position, a view; zeros before the first one."""
        if position < 0:
            return self.data.new_zeros(self.of.column)
        of = self.of
        first = of.state + MOST_PENDING * of.update + position % of.columns * of.column
        return self.data[record, first : first + of.column]


def _convolve_segment(records: Records, segment: Segment, columns: Tensor, weight: Tensor) -> Tensor:
    """Convolve the columns [rows, width] of one sequence, and store those that later passes need."""
    of, state, start, seen = records.of, segment.state, segment.start, records.of.conv - 1
    assert state is not None, "a pass without records"
    assert segment.is_chain, "a layer with a state takes no trees"
    before = [records.column(state.read, position) for position in range(start - seen, start)]
    every = torch.cat((torch.stack(before).to(columns.dtype), columns)) if before else columns
    at = {position: every[position - start + seen] for position in range(start - seen, segment.end)}
    out = (every.unfold(0, of.conv, 1) * weight).sum(-1)
    end = start + state.certain
    stored = [(state.read, range(start, segment.end))]
    if state.write != NO_RECORD:
        stored = [(state.write, range(max(0, end - seen), segment.end))]
    if state.save != NO_RECORD:
        stored.append((state.save, range(max(0, state.saved - seen), state.saved)))
    for record, positions in stored:
        for position in positions:
            own = at[position] if position in at else records.column(state.read, position).clone()
            records.column(record, position).copy_(own)
    return out


def _recur_segment(of: State, records: Records, segment: Segment, rows: StateInputs) -> Tensor:
    """Compute the rows of one sequence after the updates that wait for its state."""
    own, sizes = segment.state, (of.key_size, of.heads * of.head_dim, of.heads)
    assert own is not None, "a pass without records"
    shape, results = (of.heads, of.key_dim, of.head_dim), list[Tensor]()
    state = records.data.new_zeros(shape) if own.read == NO_RECORD else records.state(own.read).view(shape).clone()

    def keep(position: int) -> None:
        if own.save != NO_RECORD and position == own.saved:
            records.state(own.save).copy_(state.flatten())
        if own.write != NO_RECORD and position == segment.start + own.certain:
            records.state(own.write).copy_(state.flatten())

    keep(own.settled)
    for position in range(own.settled, segment.start):
        key, added, decay = records.update(own.read, position).split_with_sizes(sizes)
        keys = key.view(of.key_heads, -1).repeat_interleave(of.heads // of.key_heads, 0)
        state = state * decay[:, None, None] + keys[..., None] * added.view(of.heads, 1, -1)
        keep(position + 1)
    for row, position in enumerate(range(segment.start, segment.end)):
        inputs = StateInputs(*(each[row].to(state.dtype) for each in rows))
        state, added = change(of, state, inputs)
        results.append((state * inputs.query[..., None]).sum(-2))
        if row >= own.certain:
            to = own.read if own.write == NO_RECORD else own.write
            keys = inputs.key[:: of.heads // of.key_heads]
            records.update(to, position).copy_(torch.cat((keys.flatten(), added.flatten(), inputs.decay)))
        keep(position + 1)
    return torch.stack(results).to(rows.value.dtype)


@dataclass(frozen=True)
class StoredKeys(Attend, Recurrence):
    """Attention of a flat batch over the keys and values of a storage, to which it adds its own; states likewise.

    Rows are [T, heads, head_dim]. Every layer uses the slots and the masks of its own sliding window. Keys that no row
    of a pass sees are not read.
    """

    batch: Batch
    storage: KVStorage
    groups: dict[int | None, int]  # window -> the group of layers whose slots are used
    seen: dict[_Kind, list[Seen]]  # for each segment

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

    @override
    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """Heads that share a key head are folded into rows, so keys and values are not repeated."""
        storage, segments, seen = self.storage, self.batch.segments, self.seen[_kind(of)]
        if of.shares is None and not of.source:
            storage.write(layer, self.batch.slots_of(self.groups[of.window]), key, value)
        parts = [query] if len(segments) == 1 else query.split_with_sizes([each.num_rows for each in segments])
        out = [
            _attend_one(of, rows, *storage.read(layer, each.slots), each, learned)
            for each, rows in zip(seen, parts, strict=True)
        ]
        return out[0] if len(out) == 1 else torch.cat(out)

    @override
    def convolve(self, layer: int, of: State, columns: Tensor, weight: Tensor) -> Tensor:
        records, parts, first = self._records(layer, of), list[Tensor](), 0
        for segment in self.batch.segments:
            own = columns[first : first + segment.num_rows]
            parts.append(_convolve_segment(records, segment, own, weight))
            first += segment.num_rows
        return torch.cat(parts)

    @override
    def recur(self, layer: int, of: State, rows: StateInputs) -> Tensor:
        records, parts, first = self._records(layer, of), list[Tensor](), 0
        for segment in self.batch.segments:
            own = StateInputs(*(each[first : first + segment.num_rows] for each in rows))
            parts.append(_recur_segment(of, records, segment, own))
            first += segment.num_rows
        return torch.cat(parts)

    def _records(self, layer: int, of: State) -> Records:
        return Records(state_shape(of), self.storage.records(layer))


def groups_of(layers: Sequence[Layer], batch: Batch) -> dict[int | None, int]:
    """Return the group of layers whose slots in a batch are used, for each sliding window of layers."""
    windows = by_length(layer.window for layer in layers)
    return {window: index if batch.num_groups > 1 else 0 for index, window in enumerate(windows)}


def _kind(of: Attention) -> _Kind:
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


def gate_clamped(of: Clamped, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gated activation of two tensors of one shape; see `Clamped`."""
    gate = gate.clamp(max=of.limit)
    return (up.clamp(-of.limit, of.limit) + 1) * gate * torch.sigmoid(of.gain * gate)


class FeedForward(nn.Module):
    """A feed-forward block, or one expert."""

    def __init__(self, of: Mlp | Experts, hidden: int) -> None:
        super().__init__()
        self._gated, self._clamped = (of.gated, None) if isinstance(of, Mlp) else (True, of.clamped)
        if self._gated:
            self.gate_proj = nn.Linear(hidden, of.size, bias=of.bias)
        self.up_proj = nn.Linear(hidden, of.size, bias=of.bias)
        self.down_proj = nn.Linear(of.size, hidden, bias=of.bias)
        self._activation: Callable[[Tensor], Tensor] = reference.ACTIVATIONS[of.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        up = self.up_proj(x)
        if self._clamped:
            inner = gate_clamped(self._clamped, self.gate_proj(x), up)
        else:
            inner = self._activation(self.gate_proj(x)) * up if self._gated else self._activation(up)
        out: Tensor = self.down_proj(inner)
        return out


class RoutedMlp(nn.Module):
    """A router, a block for each expert, and perhaps one for all rows. One expert after the other computes its rows."""

    def __init__(self, of: Experts, hidden: int) -> None:
        super().__init__()
        self._of = of
        self.router = nn.Linear(hidden, of.count, bias=of.bias)
        self.expert_bias = nn.Parameter(torch.zeros(of.count)) if of.favours else None
        self.experts = nn.ModuleList(FeedForward(of, hidden) for _ in range(of.count))
        self.shared_expert = FeedForward(of.shared, hidden) if of.shared else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if of.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        indices, weights = self.route(rows)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(indices == index)
            out = out.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        if self.shared_expert is not None:
            shared = self.shared_expert(rows)
            gate = self.shared_expert_gate
            out = out + (shared if gate is None else shared * torch.sigmoid(gate(rows)))
        return out.view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the experts that rows x [r, hidden] use, and their weights, both [r, used].

        The sort is stable, so the lowest index wins among equal scores.
        """
        of, scores = self._of, self.router(x).to(torch.promote_types(x.dtype, torch.float32))
        scores = scores.sigmoid() if of.sigmoid else scores
        favoured = scores if self.expert_bias is None else scores + self.expert_bias
        used = favoured.sort(dim=-1, descending=True, stable=True).indices[:, : of.used]
        weights = scores.gather(-1, used)
        if not of.sigmoid:
            weights = (weights - (weights if of.renormalise else scores).logsumexp(-1, keepdim=True)).exp()
        elif of.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return used, (weights if of.factor == 1 else weights * of.factor).to(x.dtype)


LEAST_SUM = 1e-6  # is added to a sum of sigmoids


class RopeAngles(NamedTuple):
    """What rotary positions do to rows; see `Rotary.angles` and `Rotary.query_factors`."""

    cos: Tensor
    sin: Tensor
    query_factors: Tensor | None


Angles = Mapping[Rope, RopeAngles]


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits [r, vocab_size] from those [r, n] of a short head with the ids `tokens` [n]; others are -inf."""
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, tokens, logits)


def rotaries(config: DecoderConfig) -> dict[Rope, Rotary]:
    """Return the angles of each of a decoder's `rotations`."""
    return {rotation: Rotary(rotation, rotation.dims or 0) for rotation in rotations(config)}


def angles_of(
    own: Mapping[Rope, Rotary], positions: Tensor, dtype: torch.dtype, long: Tensor | None = None
) -> dict[Rope, RopeAngles]:
    """Return the angles of rows at positions [n]. long: see `Rotary.angles`; None = by the last of the positions."""
    if long is None:
        long = _after_restart(own, positions)
    made = dict[Rope, RopeAngles]()
    for rope, rotary in own.items():
        factors = rotary.query_factors(positions)
        made[rope] = RopeAngles(
            *rotary.angles(positions, dtype, long), None if factors is None else factors[:, None, None].to(dtype)
        )
    return made


def _after_restart(own: Mapping[Rope, Rotary], positions: Tensor) -> Tensor | None:
    """Return whether the only text of a pass is long, for each row."""
    at = restart_of(own)
    return None if at is None else (positions.max() >= at).expand(len(positions))


class NormLayer(nn.Module):
    """Normalisation of the last dimension."""

    def __init__(self, dim: int, norm: Norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim)) if norm.scaled else None
        self.bias = nn.Parameter(torch.zeros(dim)) if norm.bias else None
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        of, scales = self._norm, x.new_ones(x.shape[-1]) if self.weight is None else self.weight
        if of.kind == "layer":
            return reference.layer_norm(x, scales + of.offset if of.offset else scales, self.bias, of.eps)
        if not of.offset:
            return self._biased(reference.rms_norm(x, scales, of.eps))
        wide = x if x.dtype == torch.float64 else x.float()
        return self._biased(reference.rms_norm(wide, scales.to(wide.dtype) + of.offset, of.eps).to(x.dtype))

    def of_parts(self, x: Tensor, count: int) -> Tensor:
        """Normalise each of `count` equal parts of x [..., dim], which has no bias, by its own root mean square."""
        parts = x.view(*x.shape[:-1], count, -1)
        ones = x.new_ones(parts.shape[-1])
        normed = reference.rms_norm(parts, ones, self._norm.eps).flatten(-2)
        return normed if self.weight is None else normed * self.weight.to(x.dtype)

    def _biased(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x + self.bias


class LayerAttention(nn.Module):
    """A layer's attention, which reads inputs [..., inputs]; over a source, keys and values are computed apart."""

    def __init__(self, of: Attention, layer: int, inputs: int, hidden: int) -> None:
        super().__init__()
        self._of, self._layer, self._rotation = of, layer, rotation_of(of)
        self.q_proj = nn.Linear(inputs, of.query_size, bias=of.bias)
        if of.own_kv_heads:
            self.k_proj = nn.Linear(inputs, of.key_size, bias=of.bias)
            self.v_proj = nn.Linear(inputs, of.key_size, bias=of.bias)
        if of.gated:
            self.gate_proj = nn.Linear(inputs, of.query_size, bias=of.bias)
        self.o_proj = nn.Linear(of.query_size, hidden, bias=of.output_bias)
        if of.qk_norm:
            self.q_norm = NormLayer(of.normed_sizes[0], of.qk_norm)
            self.k_norm = NormLayer(of.normed_sizes[1], of.qk_norm) if of.own_kv_heads else None
        self.v_norm = NormLayer(of.head_dim, of.value_norm) if of.value_norm and of.own_kv_heads else None
        self.sinks = nn.Parameter(torch.zeros(of.heads)) if of.sinks else None
        owns = of.distances is not None and of.distances.shares is None
        self.distances = _table(of.distances.buckets, of.heads) if of.distances and owns else None

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Map x [..., inputs] to [..., hidden]."""
        of, query = self._of, self._heads(self.q_proj(x), self._of.heads, "q_norm")
        key = value = query[..., :0, :]  # of a layer that reads another's, or a source's
        if of.own_kv_heads and not of.source:
            key, value = self._keys(x)
        if self._rotation:
            cos, sin, factors = angles[self._rotation]
            rotated = reference.rotate(torch.cat((query, key), dim=-2), cos, sin)
            query, key = rotated.split_with_sizes((of.heads, of.own_kv_heads), dim=-2)
            query = query if factors is None else query * factors
        learned = Learned(self.sinks, None if self.distances is None else self.distances.weight)
        attended = attend(self._layer, of, query, key, value, learned).flatten(-2)
        if of.gated:
            attended = attended * torch.sigmoid(self.gate_proj(x))
        projected: Tensor = self.o_proj(attended)
        return projected

    def keys(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return the keys and values [..., kv_heads, head_dim] of x [..., inputs], as a cache holds them."""
        key, value = self._keys(x)
        if self._rotation:
            cos, sin, _ = angles[self._rotation]
            key = reference.rotate(key, cos, sin)
        return key, value

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys before their rotation, and values."""
        key = self._heads(self.k_proj(x), self._of.kv_heads, "k_norm")
        value = self.v_proj(x).view(key.shape)
        return key, value if self.v_norm is None else self.v_norm(value)

    def _heads(self, x: Tensor, heads: int, norm: str) -> Tensor:
        """Return queries or keys [..., heads, head_dim] after their norm, if they have one."""
        of, normed = self._of, self.get_submodule(norm) if self._of.qk_norm else nn.Identity()
        if of.norm_all_heads:
            return normed(x).view(*x.shape[:-1], heads, of.head_dim)  # type: ignore[no-any-return]
        return normed(x.view(*x.shape[:-1], heads, of.head_dim))  # type: ignore[no-any-return]


class LayerState(nn.Module):
    """What a layer has in place of attention; see `State`. It reads inputs [..., inputs]."""

    def __init__(self, of: State, layer: int, inputs: int, hidden: int) -> None:
        super().__init__()
        self._of, self._layer = of, layer
        for name, size in of.projections.items():
            self.add_module(name, nn.Linear(inputs, size, bias=of.bias))
        self.conv1d = nn.Conv1d(of.width, of.width, of.conv, groups=of.width, bias=of.conv_bias)
        self.out_proj = nn.Linear(of.size, hidden, bias=of.bias)
        if of.heads:
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(of.heads)), nn.Parameter(torch.zeros(of.heads))
        if of.heads and of.steps:
            self.D = nn.Parameter(torch.ones(of.heads))
        self.norm = NormLayer(of.normed_size, of.norm) if of.norm else None

    def forward(self, x: Tensor, states: Recurrence) -> Tensor:
        """Map x [..., n, inputs] to [..., n, hidden]."""
        of, parts = self._of, [self.get_submodule(name)(x) for name in self._of.projections]
        mix = self._convolved if not of.heads else self._scan if of.steps else self._recur
        out: Tensor = self.out_proj(mix(states, *parts))
        return out

    def _convolved(self, states: Recurrence, parts: Tensor) -> Tensor:
        before, after, columns = parts.chunk(3, dim=-1)
        return after * self._convolve(states, before * columns)

    def _convolve(self, states: Recurrence, columns: Tensor) -> Tensor:
        out = states.convolve(self._layer, self._of, columns, self.conv1d.weight.squeeze(1))
        return out if self.conv1d.bias is None else out + self.conv1d.bias

    def _recur(self, states: Recurrence, columns: Tensor, gate: Tensor, rate: Tensor, time: Tensor) -> Tensor:
        of, wide = self._of, torch.promote_types(columns.dtype, torch.float32)
        convolved = torch.nn.functional.silu(self._convolve(states, columns))
        query, key, value = convolved.split_with_sizes((of.key_size, of.key_size, of.size), -1)
        query, key = (self._heads(unit(_of_heads(each, of.key_dim).to(wide))) for each in (query, key))
        values, decay = _of_heads(value, of.head_dim).to(wide), self._decay(self._steps(time.to(wide)))
        rows = StateInputs(key, values, decay, rate.sigmoid().to(wide), query * of.key_dim**-0.5)
        result = states.recur(self._layer, of, rows).to(columns.dtype)
        normed = result if self.norm is None else self.norm(result)
        gates = torch.nn.functional.silu(_of_heads(gate, of.head_dim).to(wide))
        return (normed * gates).to(columns.dtype).flatten(-2)

    def _scan(self, states: Recurrence, parts: Tensor) -> Tensor:
        of, wide = self._of, torch.promote_types(parts.dtype, torch.float32)
        gate, columns, time = parts.split_with_sizes((of.size, of.width, of.heads), -1)
        convolved = torch.nn.functional.silu(self._convolve(states, columns)).to(wide)
        value, key, query = convolved.split_with_sizes((of.size, of.key_size, of.key_size), -1)
        query, key = (self._heads(_of_heads(each, of.key_dim)) for each in (query, key))
        values, steps = _of_heads(value, of.head_dim), self._steps(time.to(wide)).clamp(*of.steps or ())
        result = states.recur(self._layer, of, StateInputs(key, values, self._decay(steps), steps, query))
        gated = (result + values * self.D[:, None].to(wide)).flatten(-2) * torch.nn.functional.silu(gate.to(wide))
        return (gated if self.norm is None else self.norm.of_parts(gated, of.key_heads)).to(parts.dtype)

    def _steps(self, time: Tensor) -> Tensor:
        return torch.nn.functional.softplus(time + self.dt_bias.to(time.dtype))

    def _decay(self, steps: Tensor) -> Tensor:
        return (-self.A_log.to(steps.dtype).exp() * steps).exp()

    def _heads(self, x: Tensor) -> Tensor:
        """Return queries or keys [..., key_heads, key_dim] for each head."""
        return x.repeat_interleave(self._of.heads // self._of.key_heads, -2)


def _of_heads(x: Tensor, dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, dim)


def unit(x: Tensor) -> Tensor:
    """Return vectors [..., dim] of length 1, or less near 0."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LEAST_SQUARES)


LEAST_SQUARES = 1e-6


class LayerTokens(nn.Module):
    """The inputs of a layer by token; see `TokenInputs`."""

    def __init__(self, of: TokenInputs, hidden: int) -> None:
        super().__init__()
        self._of, self._activation = of, reference.ACTIVATIONS[of.activation]
        self.embed_tokens = _table(of.rows, of.size)
        self.projection = nn.Linear(hidden, of.size, bias=False)
        self.norm = NormLayer(of.size, of.norm)
        self.gate_proj = nn.Linear(hidden, of.size, bias=False)
        self.out_proj = nn.Linear(of.size, hidden, bias=False)
        self.output_norm = NormLayer(hidden, of.norm)

    def forward(self, x: Tensor, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Return x [..., hidden] after the inputs of tokens [...] with input embeddings [..., hidden] are added."""
        of, table = self._of, self.embed_tokens(tokens)
        projected = self.norm(self.projection(embedded) * of.projection_factor)
        inputs = (projected + table * torch.tensor(of.table_factor, dtype=table.dtype)) * of.factor
        added: Tensor = self.output_norm(self.out_proj(self._activation(self.gate_proj(x)) * inputs))
        return x + added


class DecoderLayer(nn.Module):
    """Attention and feed-forward blocks, each added to the residual stream. inputs: the width that attention reads.

    Attention over a source follows self-attention.
    """

    def __init__(self, layer: Layer, index: int, hidden: int, inputs: int) -> None:
        super().__init__()
        self._of = layer
        if layer.attention:
            self.self_attn = LayerAttention(layer.attention, index, inputs, hidden)
        if layer.state:
            self.linear_attn = LayerState(layer.state, index, inputs, hidden)
        self.cross_attn = LayerAttention(layer.cross, index, hidden, hidden) if layer.cross else None
        mlp = layer.mlp
        self.mlp = RoutedMlp(mlp, hidden) if isinstance(mlp, Experts) else FeedForward(mlp, hidden)
        for name, norm in layer_norms(layer).items():
            self.add_module(name, NormLayer(hidden, norm))
        self.token_inputs = LayerTokens(layer.token_inputs, hidden) if layer.token_inputs else None
        self.scale = nn.Parameter(torch.ones(1)) if layer.scaled else None

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        return self.add(x, self._after(BEFORE_ATTENTION, x), angles, attend)

    def add(self, x: Tensor, entering: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Add all blocks to the residual stream x [..., hidden]; attention reads `entering` [..., inputs]."""
        state = self._of.state
        mixed = self.linear_attn(entering, recurrence_of(attend)) if state else self.self_attn(entering, angles, attend)
        attended = x + self._scaled(self._after(AFTER_ATTENTION, mixed))
        attended = self._after(END_ATTENTION, attended)
        if self.cross_attn is not None:
            attended = attended + self._scaled(self.cross_attn(self._after(BEFORE_CROSS, attended), angles, attend))
            attended = self._after(END_CROSS, attended)
        if self._of.parallel:
            inner = self.mlp(self._after(BEFORE_MLP, x) if self._of.before_mlp else entering)
        else:
            inner = self.mlp(self._after(BEFORE_MLP, attended))
        return self._after(END_MLP, attended + self._scaled(self._after(AFTER_MLP, inner)))

    def end(self, x: Tensor, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Return the residual stream x [..., hidden] after the inputs of tokens [...], and its scale."""
        if self.token_inputs is not None:
            x = self.token_inputs(x, tokens, embedded)
        return x if self.scale is None else x * self.scale

    def _after(self, norm: str, x: Tensor) -> Tensor:
        """Return x after one of the norms, if the layer has it."""
        found: Tensor = self.get_submodule(norm)(x) if norm in self._modules else x
        return found

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._of.residual_scale == 1 else x * self._of.residual_scale


class Positioned(nn.Module):
    """Input embeddings; `embedded` makes the residual stream from them. Sinusoids are not parameters."""

    def __init__(self, of: Embedding) -> None:
        super().__init__()
        learned = learned_positions(of)
        self.embed_positions = _table(learned, of.hidden_size) if learned else None
        self.embedding_norm = NormLayer(of.hidden_size, of.norm) if of.norm else None
        self._sinusoids = of.positions is not None and of.sinusoids

    def embedded(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the vectors of positions [n] to input embeddings x [..., n, hidden], and normalise the sums."""
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self._sinusoids:
            x = x + sinusoids(positions, x.shape[-1]).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)


class EncoderLayers(Positioned):
    """The layers that read a source, and their norm."""

    def __init__(self, of: Encoder, embedding: Embedding) -> None:
        super().__init__(embedding)
        self.of, hidden = of, embedding.hidden_size
        self.layers = nn.ModuleList(DecoderLayer(each, i, hidden, hidden) for i, each in enumerate(of.layers))
        self.norm = NormLayer(hidden, of.norm)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Encode sources with input embeddings x [..., n, hidden]. positions [n] are those of the rows."""
        x, attend = self.embedded(x, positions), Sharing(attend, self.of.layers)
        for layer in self.layers:
            x = layer(x, {}, attend)
        out: Tensor = self.norm(x)
        return out


class _Backbone(Positioned):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.embedding)
        own, hidden = config.embedding, config.hidden_size
        # From a tensor: on "meta", the default initialisation would import torch's compiler, which takes a second.
        self.embed_tokens = _table(own.vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(each, i, hidden, hidden) for i, each in enumerate(config.layers))
        self.norm = NormLayer(hidden, config.norm)


def _table(rows: int, width: int) -> nn.Embedding:
    zeros = torch.zeros(rows, width)
    table: nn.Embedding = nn.Embedding.from_pretrained(zeros, freeze=False)  # type: ignore[no-untyped-call]
    return table


def fill(model: nn.Module, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module on the device "meta" its parameters, without gradients, in memory of their own."""
    for name in [name for name, _ in model.named_parameters()]:
        part, _, own = name.rpartition(".")
        tensor = read_plain(weights, name).to(device=device, dtype=dtype, copy=True)
        setattr(model.get_submodule(part), own, nn.Parameter(tensor, requires_grad=False))


def needs_of(config: DecoderConfig) -> ModelNeeds:
    """Return the needs of a decoder."""
    most_nodes = MOST_PENDING - 1 if config.states else None
    return ModelNeeds(source=config.encoder is not None, most_nodes=most_nodes, restart_at=config.restart_at)


class DescribedModule(nn.Module, ABC, RunsPasses):
    """The sizes of a `CausalLM` that a description determines."""

    @property
    @abstractmethod
    def described(self) -> DecoderConfig:
        """The description."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding rows included."""
        return self.described.vocab_size

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.described.num_layers

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state and of an input embedding."""
        return self.described.hidden_size

    @property
    def max_positions(self) -> int:
        """The longest context that the model was trained for, in positions."""
        return self.described.max_positions

    @override
    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """This model draws none by itself."""
        return chains


class Decoder(DescribedModule, BackendModel):
    """A `CausalLM`: embedding, layers, norm, and a head that may share the embedding's weight."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.needs = needs_of(config)
        self.model = _Backbone(config)
        self.encoder = EncoderLayers(config.encoder, config.embedding) if config.encoder else None
        rows, biased = len(config.head.tokens) or config.vocab_size, config.head.bias
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=biased)
        self.tie_head()
        self._rotaries = rotaries(config)
        self._cache_type: torch.dtype | None = None

    @property
    @override
    def described(self) -> DecoderConfig:
        return self.config

    @property
    def mask_token(self) -> int | None:
        """The token that stands for an unknown one; None = the model has none."""
        return self.config.embedding.mask

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of one position of this model's cache."""
        weight = self.model.embed_tokens.weight
        return cache_shape(self.config, weight.dtype, weight.device, self._cache_type)

    @override
    def relative_reads(self, rows: int) -> float:
        return self._reads(rows)

    @cached_property
    def _reads(self) -> Callable[[int], float]:
        return relative_reads(self.config)

    @property
    @override
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.parameters() if weight.ndim > 1)  # a shared one counts once

    @cached_property
    def _head_tokens(self) -> Tensor:
        return torch.tensor(self.config.head.tokens, device=self.lm_head.weight.device)

    def tie_head(self) -> None:
        """Share the embedding's weight with the head if the config ties them; call it after parameters are replaced."""
        if self.config.head.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @override
    def embed(self, tokens: Tensor) -> Tensor:
        """In the model's dtype."""
        check_tokens(tokens, self.vocab_size)
        return self.look_up(tokens)

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        check_taps(taps, self.num_layers)
        check_sources(batch, self.needs)
        tokens, inputs = self._inputs(batch)
        attend = StoredKeys.build(batch, storage, self.config.layers, inputs.dtype)
        entering = {}  # hidden states by the layer that takes them as input
        long = batch.long_rows(self.needs)
        for index, x in enumerate(self.states(inputs, batch.positions, attend, long, tokens)):
            if index in taps:
                entering[index] = x
        return Hidden(self.model.norm(x), tuple(entering[tap] for tap in taps))

    @override
    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """The encoder's own keys and values are in the first layer of the cache."""
        encoded = self._encoded(batch, storage) if batch.hidden is None else batch.hidden.to(self.cache_shape.dtype)
        for index, (key, value) in enumerate(self.source_keys(encoded)):
            storage.write(index, batch.slots_of(0), key, value)
        return encoded

    def _encoded(self, batch: Batch, storage: KVStorage) -> Tensor:
        assert self.encoder is not None, "the model has no encoder"
        _, x = self._inputs(batch)
        attend = StoredKeys.build(batch, storage, self.encoder.of.layers, x.dtype)
        encoded: Tensor = self.encoder(x, batch.positions, lambda _, *inputs: attend(0, *inputs))
        return encoded

    def source_keys(self, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys and values [..., kv_heads, head_dim] of a source, from the encoder's result."""
        for layer in cast(list[DecoderLayer], self.model.layers):
            assert layer.cross_attn is not None
            yield layer.cross_attn.keys(encoded, {})

    def states(
        self, x: Tensor, positions: Tensor, attend: Attend, long: Tensor | None = None, tokens: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the input [..., n, hidden] of each layer, and the output of the last one.

        x are the tokens' embeddings, to which learned positions are added. positions [n] are those of the rows. long:
        see `angles_of`. tokens [..., n]; None = rows have embeddings alone, see `TokenInputs`.
        """
        embedded, attend = x, Sharing(attend, self.config.layers)
        tokens = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device) if tokens is None else tokens
        angles = angles_of(self._rotaries, positions, x.dtype, long)
        x = self.model.embedded(x, positions)
        yield x
        for layer in cast(list[DecoderLayer], self.model.layers):
            x = layer.end(layer(x, angles, attend), tokens, embedded)
            yield x

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the tokens [T] and the input embeddings [T, hidden] of a batch: looked up, except for rows' own."""
        check_embeddings(batch, self.hidden_size)
        if batch.embeddings is None:
            return batch.tokens, self.look_up(batch.tokens)
        tokens = batch.tokens.index_fill(0, batch.embedded_rows, 0)
        x = self.look_up(tokens)
        return tokens, x.index_copy(0, batch.embedded_rows, batch.embeddings.to(x.dtype))

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [..., hidden] of tokens [...], which must be known."""
        out: Tensor = self.model.embed_tokens(tokens)
        scale = self.config.embedding.scale
        return out if scale == 1 else out * torch.tensor(scale, dtype=out.dtype)

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        head = self.config.head
        out: Tensor = self.lm_head(hidden)
        out = reference.soft_cap(out if head.scale == 1 else out * head.scale, head.softcap)
        return spread(out, self._head_tokens, self.vocab_size) if self.config.head.tokens else out

    @override
    def truncated(self, num_layers: int) -> Decoder:
        with torch.device("meta"):
            model = Decoder(self.config.truncated(num_layers))
        model.model.embed_tokens, model.model.norm = self.model.embed_tokens, self.model.norm
        model.model.embed_positions = self.model.embed_positions
        model.model.embedding_norm = self.model.embedding_norm
        model.model.layers, model.lm_head = self.model.layers[:num_layers], self.lm_head
        model.encoder = self.encoder
        model._cache_type = self._cache_type
        return model.eval()

    @override
    def storing_keys_as(self, dtype: torch.dtype) -> Decoder:
        model = copy.copy(self)
        model._cache_type = dtype
        return model
