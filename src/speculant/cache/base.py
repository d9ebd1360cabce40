"""The parts of a KV cache: a block manager for the bookkeeping, and a storage for the keys and values.

A cache holds, per sequence, one key and one value per layer for each position of its tokens. The storage is flat: a
position has a *slot*. A block is a run of consecutive slots, and a sequence's block table lists its blocks:

    position p   has the slot   table[p // block_size] * block_size + p % block_size

    sequence   [ committed positions | reserved by this pass ]
                0 .. start-1            start .. start+n-1

Layers with a sliding window need only the last positions. Layers of the same window are a *group*, which has blocks, a
storage and a part of each block table of its own. Blocks that no later row of the group sees are given back:

    no window   [ b7 | b2 | b5 | b1 . ]
    window      [  0 |  0 | b4 | b6 . ]     0 = given back; nothing reads it

The group that keeps the most positions is the first one. It decides how much room there is: a later group has a block
for each of its blocks, or for all that can be in use at once (`CacheMemory`).

The block manager works with plain integers and owns no tensor; the storage receives slots and moves. The two may be in
different processes, and this module does not import torch.
"""

from __future__ import annotations

from array import array
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
    cache/rounding.py.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()
    own: tuple[LayerShape, ...] = ()
    stored: torch.dtype | None = None

    def __post_init__(self) -> None:
        for what, each in (("windows", self.windows), ("shapes", self.own)):
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
    def is_rounded(self) -> bool:
        """Whether keys and values are rounded to int8."""
        return self.stored is not None and not self.stored.is_floating_point


def by_length(windows: Iterable[int | None]) -> list[int | None]:
    """Return the different windows, the longest first; None = all positions. Groups of layers have this order."""
    return sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))


def first_seen(window: int | None, length: int) -> int:
    """Return the first position that a row at position `length` sees, and so does any later row."""
    return 0 if window is None else max(0, length - window + 1)


@dataclass(frozen=True)
class Moves:
    """Slots to copy within the storage, in every layer: `sources[i]` is copied to `targets[i]`.

    All sources are read before any target is written, and no target occurs twice. A block manager's moves have to be
    applied in the order in which it returned them, before the slots are written or read again. These are the slots of
    the first group of layers; `others` has those of each further one.
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

    `moves` are copies on write, to be applied before the slots are written. `others` has the slots of each further
    group of layers.
    """

    seq_id: int
    start: int
    slots: Sequence[int]
    moves: Moves = NO_MOVES
    others: Sequence[Sequence[int]] = ()

    @property
    def end(self) -> int:
        """The sequence's length once these positions are written."""
        return self.start + len(self.slots)


class ReservationPlan(Protocol):
    """The positions that one step will reserve, counted before anything is reserved."""

    def room(self, seq_id: int) -> int:
        """Return how many more positions can be taken for a sequence."""
        ...

    def take(self, seq_id: int, n: int) -> bool:
        """Count n positions (n >= 0) for a sequence if there is room for them; return whether there is."""
        ...


class BlockManager(Protocol):
    """Assigns slots to sequences: block tables, reference counts, prefix index. Plain integers, no tensor.

    The rollback contract (docs/references.md, rollback): after a pass, `truncate_to` or `compact` drops rejected nodes,
    and the next pass overwrites stale slots.
    """

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the first group, free and held; those of each group are numbered from 0."""
        ...

    @property
    def num_groups(self) -> int:
        """How many groups of layers have blocks of their own. One group serves layers of any windows."""
        ...

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        ...

    def reserve(self, seq_id: int, n: int) -> Slots:
        """Extend a sequence by n positions (n >= 0) and return their slots. An unknown sequence starts empty.

        Raises CapacityError, and changes nothing, when there is no room. n = 0 changes nothing.
        """
        ...

    def plan(self) -> ReservationPlan:
        """Return an empty plan; it is valid until a sequence changes. `reserve` succeeds for everything taken."""
        ...

    def table(self, seq_id: int) -> array[int]:
        """Return a sequence's block table [groups * b] of 64-bit integers, empty for an unknown one.

        A group's part lists b blocks. Those that were given back are 0. Callers must not change the table; later
        changes of the sequence make a new one.
        """
        ...

    def length(self, seq_id: int) -> int:
        """Return how many positions are held; 0 for an unknown sequence."""
        ...

    def truncate_to(self, seq_id: int, n: int) -> None:
        """Drop every position from n on (docs/references.md, rollback).

        Raises ValueError, and changes nothing, unless the sequence holds what a row at position n sees.
        """
        ...

    def holds_window(self, seq_id: int, n: int) -> bool:
        """Whether `truncate_to(seq_id, n)` is possible: nothing was given back that a row at position n sees."""
        ...

    def drop_unseen(self, seq_id: int) -> None:
        """Give back the blocks that no later row of the sequence sees; all its positions must be committed."""
        ...

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> Moves:
        """Keep positions below `base` and, of the tree nodes from `base` on, those on `path`, the accepted path.

        Node i was written at position base + i; the path's are moved to base, base + 1, ... Parents come
        before children, so a path is increasing. Raises CapacityError, and changes nothing, where a move into
        shared positions finds no room for a copy.
        """
        ...

    def fork(self, src: int, dst: int) -> Moves:
        """Give the new sequence `dst` everything that `src` holds; raises CapacityError when there is no room."""
        ...

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """Give a new sequence the longest prefix of `tokens` in the prefix index; return its number of positions.

        `limit` is the most positions to take over; None = any number. The last token is never among them: it has to
        be computed to get the next one. Only sequences of the same salt share prefixes.
        """
        ...

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Add the sequence's positions of the committed `tokens`, its first ones in order, to the prefix index.

        Where the index already has these tokens, the sequence may switch to the indexed positions.
        """
        ...

    def forget_prefixes(self) -> bool:
        """Empty the prefix index, except for positions that sequences hold; return whether it is empty."""
        ...

    def release(self, seq_id: int) -> None:
        """Free a sequence; an unknown one is ignored."""
        ...

    def free_tokens(self) -> int:
        """Return how many positions new sequences can still reserve in the first group."""
        ...

    def check(self) -> None:
        """Assert the integrity of the bookkeeping; for tests, after every step."""
        ...


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

    def move(self, moves: Moves) -> None:
        """Copy slots in every layer."""
        ...


class KVCache:
    """A block manager and the storage that it manages. Moves are applied at once; the other calls are the manager's.

    `manager` and `storage` may be used separately: a model needs only the storage.
    """

    def __init__(self, manager: BlockManager, storage: KVStorage) -> None:
        self.manager, self.storage = manager, storage
        self.num_blocks, self.block_size, self.num_groups = manager.num_blocks, manager.block_size, manager.num_groups
        self.plan, self.table, self.length, self.check = manager.plan, manager.table, manager.length, manager.check
        self.truncate_to, self.release, self.free_tokens = manager.truncate_to, manager.release, manager.free_tokens
        self.match_prefix, self.insert_prefix = manager.match_prefix, manager.insert_prefix
        self.forget_prefixes = manager.forget_prefixes
        self.drop_unseen, self.holds_window = manager.drop_unseen, manager.holds_window

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`."""
        slots = self.manager.reserve(seq_id, n)
        if slots.moves is not NO_MOVES and slots.moves:
            self.storage.move(slots.moves)
        return slots

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """See `BlockManager.compact`."""
        moves = self.manager.compact(seq_id, base, path)
        if moves:
            self.storage.move(moves)

    def fork(self, src: int, dst: int) -> None:
        """See `BlockManager.fork`."""
        moves = self.manager.fork(src, dst)
        if moves:
            self.storage.move(moves)


def require_path(seq_id: int, length: int, base: int, path: Sequence[int]) -> None:
    """Raise ValueError unless `compact(seq_id, base, path)` is valid for a sequence of `length` positions."""
    if not 0 <= base <= length or (path and list(path) != sorted(set(path).intersection(range(length - base)))):
        raise ValueError(f"compact({base}, {list(path)}) of sequence {seq_id} with {length} positions")
