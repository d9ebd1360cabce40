"""What a KV cache is made of: a block manager that keeps the books, and a storage that holds the keys and values.

A cache holds, per sequence, one key and one value per layer for each position of its tokens. The storage is flat: a
position lives in a *slot*. A sequence's slots come in blocks of consecutive ones, which its block table lists:

    position p   lives in slot   table[p // block_size] * block_size + p % block_size

    sequence   [ committed positions | reserved by this pass ]
                0 .. start-1            start .. start+n-1

The block manager works with plain integers and owns no tensor; the storage obeys slots and moves. So the two may live
in different processes, and this module does not import torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class CacheShape:
    """The size of one position: what a model stores and in which type."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one position takes over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Moves:
    """Slots to copy within the storage, in every layer: what `sources[i]` holds goes to `targets[i]`.

    All sources are read before any target is written, and no target occurs twice. A block manager's moves have to be
    applied in the order in which it returned them, before the slots are written or read again.
    """

    sources: Sequence[int] = ()
    targets: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.sources)


NO_MOVES = Moves()


class Slots(NamedTuple):
    """Where the next positions of one sequence go: `slots[i]` is the slot of position `start + i`.

    `moves` are copies on write: what has to be copied before the slots are written.
    """

    seq_id: int
    start: int
    slots: Sequence[int]
    moves: Moves = NO_MOVES

    @property
    def end(self) -> int:
        """The sequence's length once these positions are written."""
        return self.start + len(self.slots)


class ReservationPlan(Protocol):
    """What one step is going to reserve, counted before anything is reserved."""

    def room(self, seq_id: int) -> int:
        """Return how many positions more could be taken for a sequence."""
        ...

    def take(self, seq_id: int, n: int) -> bool:
        """Count n positions (n >= 0) for a sequence if there is room for them; say whether there is."""
        ...


class BlockManager(Protocol):
    """Which sequence holds which slots: block tables, reference counts, prefixes. Plain integers, no tensor.

    The rollback contract (docs/references.md, rollback): after a pass, `truncate_to` or `compact` drops what was
    not accepted, and stale slots are overwritten by the next pass.
    """

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, free and held; they are numbered from 0."""
        ...

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        ...

    def reserve(self, seq_id: int, n: int) -> Slots:
        """Extend a sequence by n positions (n >= 0) and say where they go. An unknown sequence starts empty.

        Raises CapacityError when there is no room; nothing is changed then. Nor is it when n is 0.
        """
        ...

    def plan(self) -> ReservationPlan:
        """Return an empty plan; it is good until a sequence changes. What it has room for, `reserve` grants."""
        ...

    def table(self, seq_id: int) -> array[int]:
        """Return a sequence's block table [b] of 64-bit integers, empty for an unknown one.

        It must not be changed, and later changes of the sequence make a new one.
        """
        ...

    def length(self, seq_id: int) -> int:
        """Return how many positions are held; 0 for an unknown sequence."""
        ...

    def truncate_to(self, seq_id: int, n: int) -> None:
        """Forget every position from n on (docs/references.md, rollback)."""
        ...

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> Moves:
        """Keep positions below `base` and, of the tree nodes behind it, those on `path`.

        Node i was written at position base + i; the kept ones are moved to base, base + 1, ... Parents come
        before children, so a path only rises. Raises CapacityError, and changes nothing, where a move into
        shared positions finds no room for a copy.
        """
        ...

    def fork(self, src: int, dst: int) -> Moves:
        """Give the new sequence `dst` everything that `src` holds; raises CapacityError when there is no room."""
        ...

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """Give a new sequence the positions of `tokens` that are known already; return how many.

        `limit` is the most positions to take over; None = any number. The last token is never among them: it has to
        be computed for there to be a next one. Prefixes are shared among sequences of the same salt alone.
        """
        ...

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Let other sequences take over the positions that hold the committed `tokens`: the first ones, in order.

        Where the same tokens are known already, the sequence may go on with their positions instead of its own.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Free a sequence; an unknown one is ignored."""
        ...

    def free_tokens(self) -> int:
        """Return how many positions could still be reserved by new sequences."""
        ...

    def check(self) -> None:
        """Assert the integrity of the bookkeeping; for tests, after every step."""
        ...


class KVStorage(Protocol):
    """Memory for keys and values, by slot; it knows no sequence.

    It may live in another process or on another device.
    """

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] in the given slots [T] int64."""
        ...

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, head_dim] of slots [n] int64; consecutive ones are read in place."""
        ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's whole storage, keys and values [slots, kv_heads, head_dim], without copying."""
        ...

    def move(self, moves: Moves) -> None:
        """Copy slots in every layer."""
        ...


class KVCache:
    """A block manager and the storage that it manages. Moves are applied at once.

    `manager` and `storage` may be used by themselves: a model needs the storage alone.
    """

    def __init__(self, manager: BlockManager, storage: KVStorage) -> None:
        self.manager, self.storage = manager, storage
        self.num_blocks, self.block_size = manager.num_blocks, manager.block_size

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`."""
        slots = self.manager.reserve(seq_id, n)
        self._move(slots.moves)
        return slots

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """See `BlockManager.compact`."""
        self._move(self.manager.compact(seq_id, base, path))

    def fork(self, src: int, dst: int) -> None:
        """See `BlockManager.fork`."""
        self._move(self.manager.fork(src, dst))

    def _move(self, moves: Moves) -> None:
        if moves.sources:
            self.storage.move(moves)

    def plan(self) -> ReservationPlan:
        """See `BlockManager.plan`."""
        return self.manager.plan()

    def table(self, seq_id: int) -> array[int]:
        """See `BlockManager.table`."""
        return self.manager.table(seq_id)

    def length(self, seq_id: int) -> int:
        """See `BlockManager.length`."""
        return self.manager.length(seq_id)

    def truncate_to(self, seq_id: int, n: int) -> None:
        """See `BlockManager.truncate_to`."""
        self.manager.truncate_to(seq_id, n)

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """See `BlockManager.match_prefix`."""
        return self.manager.match_prefix(seq_id, tokens, cache_salt, limit)

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `BlockManager.insert_prefix`."""
        self.manager.insert_prefix(seq_id, tokens)

    def release(self, seq_id: int) -> None:
        """See `BlockManager.release`."""
        self.manager.release(seq_id)

    def free_tokens(self) -> int:
        """See `BlockManager.free_tokens`."""
        return self.manager.free_tokens()

    def check(self) -> None:
        """See `BlockManager.check`."""
        self.manager.check()


def require_path(seq_id: int, length: int, base: int, path: Sequence[int]) -> None:
    """Raise ValueError unless `compact(seq_id, base, path)` makes sense for a sequence of that length."""
    if not 0 <= base <= length or list(path) != sorted(set(path).intersection(range(length - base))):
        raise ValueError(f"compact({base}, {list(path)}) of sequence {seq_id} with {length} positions")
