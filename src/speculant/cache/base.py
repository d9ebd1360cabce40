"""The shape of a KV cache, and its storage of keys and values.

A cache holds, per sequence, one key and one value per layer for each position of its tokens. The storage is flat: a
position has a *slot*. A block is a run of consecutive slots, and a sequence's block table lists its blocks:

    position p   has the slot   table[p // block_size] * block_size + p % block_size

    sequence   [ committed positions | reserved by this pass ]
                0 .. start-1            start .. start+n-1

Layers with a sliding window need only the last positions. Layers of the same window are a *group*, which has blocks, a
storage and a part of each block table of its own.

The bookkeeping (cache/paged.py) works with plain integers and owns no tensor; the storage receives slots and moves. The
two may be in different processes, and this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE_BYTES = 4  # of a head's key or value that is rounded to int8: a float32 scale after its numbers


class LayerShape(NamedTuple):
    """The shape of a layer's keys and values. shares: the layer whose storage it reads; None = it has its own."""

    num_kv_heads: int
    head_dim: int
    shares: int | None = None

    @property
    def heads(self) -> int:
        """The number of heads that one position takes: those of its keys and those of its values."""
        return 0 if self.shares is not None else 2 * self.num_kv_heads


NO_KEYS = LayerShape(0, 0)

MOST_PENDING = 16  # rows of a sequence that its states do not contain: those of a draft, until the next pass


class StateShape(NamedTuple):
    """The shape of a sequence's record in a layer with a state, in numbers.

        record      [ state | MOST_PENDING updates | MOST_PENDING + conv - 1 columns ]

    Position p has the update p % MOST_PENDING and the column p % (MOST_PENDING + conv - 1): what its row does to the
    state, and the input of the convolution. state, update, column: their sizes. conv: the positions that the
    convolution sees.
    """

    state: int
    update: int
    column: int
    conv: int

    @property
    def columns(self) -> int:
        """How many columns a record has."""
        return MOST_PENDING + self.conv - 1

    @property
    def size(self) -> int:
        """The numbers of a record."""
        return self.state + MOST_PENDING * self.update + self.columns * self.column


class LayerGroup(NamedTuple):
    """The layers that see `window` positions, their row's own included; None = all."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheShape:
    """The shape and type of the keys and values of one position.

    windows: how many positions a row of each layer sees, its own included; None = all, () = all in every layer. own:
    the shape of each layer, where they differ; () = all have the first one's. dtype: the type in which a model
    writes and reads them. stored: the type in which they are stored; None = dtype, torch.int8 = rounded, see
    cache/storage.py. states: the record that a sequence has in each layer, None = none; () = no layer has any.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()
    own: tuple[LayerShape, ...] = ()
    stored: torch.dtype | None = None
    states: tuple[StateShape | None, ...] = ()

    def __post_init__(self) -> None:
        for what, each in (("windows", self.windows), ("shapes", self.own), ("states", self.states)):
            if each and len(each) != self.num_layers:
                raise ValueError(f"{len(each)} {what} for {self.num_layers} layers")

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shape of each layer."""
        return self.own or (LayerShape(self.num_kv_heads, self.head_dim),) * self.num_layers

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by window; the group that keeps the most positions is the first one."""
        windows = self.windows or (None,) * self.num_layers
        return tuple(
            LayerGroup(window, tuple(layer for layer, own in enumerate(windows) if own == window))
            for window in by_length(windows)
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one position takes over all layers, keys and values."""
        return self.bytes_of(range(self.num_layers))

    def bytes_of(self, layers: Iterable[int]) -> int:
        """Return the bytes that one position takes in some layers, keys and values."""
        return sum(own.heads * self.bytes_of_head(own.head_dim) for own in (self.layers[layer] for layer in layers))

    def bytes_of_head(self, dim: int) -> int:
        """Return the bytes of one head's key or value of `dim` numbers, as it is stored."""
        return dim * (self.stored or self.dtype).itemsize + (SCALE_BYTES if self.is_rounded else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's records over all layers: they are in float32, or in float64 beside such keys."""
        return sum(of.size for of in self.states if of) * max(4, self.dtype.itemsize)

    @property
    def is_rounded(self) -> bool:
        """Whether keys and values are rounded to int8."""
        return self.stored is not None and not self.stored.is_floating_point


def by_length(windows: Iterable[int | None]) -> list[int | None]:
    """Return the different windows, the longest first; None = all positions. Groups of layers have this order."""
    return sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))


@dataclass(frozen=True)
class Moves:
    """Slots to copy within the storage, in every layer: `sources[i]` is copied to `targets[i]`.

    All sources are read before any target is written, and no target occurs twice. These are the slots of the first
    group of layers; `others` has those of each further one.
    """

    sources: Sequence[int] = ()
    targets: Sequence[int] = ()
    others: tuple[Moves, ...] = ()

    def __len__(self) -> int:
        return len(self.sources) + sum(map(len, self.others))

    def by_group(self) -> tuple[Moves, ...]:
        """Return the moves of each group; there may be groups without any."""
        return (Moves(self.sources, self.targets), *self.others)


NO_MOVES = Moves()


class Slots(NamedTuple):
    """The slots of one sequence's next positions: `slots[i]` is the slot of position `start + i`.

    `others` has the slots of each further group of layers.
    """

    seq_id: int
    start: int
    slots: Sequence[int]
    others: Sequence[Sequence[int]] = ()

    @property
    def end(self) -> int:
        """The sequence's length once these positions are written."""
        return self.start + len(self.slots)


NO_RECORD = -1  # in place of a record's number


class StateRows(NamedTuple):
    """What a pass does with the records of one sequence, whose rows begin at position `start`.

    Record `read` contains the positions below `settled`, and updates and columns of those from there to `start`;
    NO_RECORD = the sequence begins. The pass adds these updates and its first `certain` rows to the state, and writes
    it to record `write`, with the updates and columns of the other rows. NO_RECORD: it leaves the state, and adds its
    rows' updates and columns to record `read`. save: a record that gets the state of the positions below `saved`, as if
    they were the whole sequence, which are from `settled` to the end of the certain rows; or NO_RECORD.
    """

    read: int
    settled: int
    write: int
    certain: int
    save: int = NO_RECORD
    saved: int = 0


class KVStorage(Protocol):
    """Memory for keys and values, addressed by slot, without knowledge of sequences.

    The slots of a layer are those of its group. It may be in another process or on another device.
    """

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] in the given slots [T] int64."""
        ...

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, head_dim] of slots [n] int64.

        Consecutive ones are read in place, if they are stored in the model's type.
        """
        ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's whole storage, keys and values [slots, kv_heads, head_dim], without copying.

        Rounded ones are int8 [slots, kv_heads, head_dim + SCALE_BYTES].
        """
        ...

    def records(self, layer: int) -> Tensor:
        """Return the records [records, size] of a layer with a state; see `StateShape`."""
        ...

    def move(self, moves: Moves) -> None:
        """Copy slots in every layer."""
        ...

    def size(self, place: int, slots: Sequence[int]) -> int:
        """Return the bytes of the content of some slots of a group of layers, or of some records (place: STATES)."""
        ...

    def dump(self, place: int, slots: Sequence[int]) -> memoryview:
        """Return a copy of this content."""
        ...

    def load(self, place: int, slots: Sequence[int], content: memoryview) -> None:
        """Write content that `dump` returned, maybe of other slots. It lies in memory that may be written to."""
        ...
