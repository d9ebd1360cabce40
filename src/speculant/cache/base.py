"""What every KV cache does.

A cache holds, per sequence, one key and one value per layer for each position that has been fed.
Storage is flat: a position lives in a *row*. A sequence's rows come in blocks of consecutive ones:

    position p   lives in row   blocks[p // block_size] * block_size + p % block_size

    sequence   [ committed positions | reserved by this pass ]
                0 .. start-1            start .. start+n-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speculant.tree import ids

CPU = torch.device("cpu")


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
class Slots:
    """Where the next positions of one sequence go: `places[i]` is the storage row of `start + i`."""

    seq_id: int
    start: int
    places: Sequence[int]
    device: torch.device = CPU

    @property
    def rows(self) -> Tensor:
        """The storage rows [n] int64, beside the storage."""
        return ids(self.places).to(self.device)

    @property
    def end(self) -> int:
        """The sequence's length once these positions are written."""
        return self.start + len(self.places)


@dataclass(frozen=True)
class BlockTable:
    """Where a sequence's positions live, for kernels that walk it; see the module's text."""

    blocks: Tensor  # [b] int64
    block_size: int


class ReservationPlan(Protocol):
    """What one step is going to reserve, counted before anything is reserved."""

    def room(self, seq_id: int) -> int:
        """Return how many positions more could be taken for `seq`."""
        ...

    def take(self, seq_id: int, n: int) -> bool:
        """Count n positions (n >= 0) for `seq` if it has room for them; say whether it has."""
        ...


class KVCache(Protocol):
    """Keys and values of many sequences.

    The rollback contract (docs/references.md, rollback): after a pass, `truncate_to` or `compact` drops what was
    not accepted, and stale rows are overwritten by the next pass.
    """

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, free and held."""
        ...

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        ...

    def reserve(self, seq_id: int, n: int) -> Slots:
        """Extend `seq` by n positions (n >= 0) and say where they go. An unknown sequence starts empty.

        Raises CapacityError when there is no room; the cache is then unchanged. So it is when n is 0.
        """
        ...

    def plan(self) -> ReservationPlan:
        """Return an empty plan; it is good until the cache changes. What it has room for, `reserve` grants."""
        ...

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] in the given rows [T]."""
        ...

    def read(self, layer: int, seq_id: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of a sequence, in position order."""
        ...

    def table(self, seq_id: int) -> BlockTable:
        """Return where a sequence's positions live; rows are those of `layer`."""
        ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's whole storage, keys and values [rows, kv_heads, head_dim], without copying."""
        ...

    def length(self, seq_id: int) -> int:
        """Return how many positions are held; 0 for an unknown sequence."""
        ...

    def truncate_to(self, seq_id: int, n: int) -> None:
        """Forget every position from n on (docs/references.md, rollback)."""
        ...

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """Keep positions below `base` and, of the tree nodes behind it, those on `path`.

        Node i was written at position base + i; the kept ones are moved to base, base + 1, ... Parents come
        before children, so a path only rises. Raises CapacityError, and changes nothing, where a move into
        shared positions finds no room for a copy.
        """
        ...

    def fork(self, src: int, dst: int) -> None:
        """Give the new sequence `dst` everything that `src` holds; raises CapacityError when there is no room."""
        ...

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Give the new sequence `seq` the positions of `tokens` that are known already; return how many.

        The last token is never among them: it has to be fed for there to be a next one. Prefixes are
        shared among sequences of the same salt alone.
        """
        ...

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Let others adopt the positions of `seq` that hold the committed `tokens`: its first ones, in order.

        Where the same tokens are known already, `seq` may go on with their positions instead of its own.
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


def require_path(seq_id: int, length: int, base: int, path: Sequence[int]) -> None:
    """Raise ValueError unless `compact(seq, base, path)` makes sense for a sequence of that length."""
    if not 0 <= base <= length or list(path) != sorted(set(path).intersection(range(length - base))):
        raise ValueError(f"compact({base}, {list(path)}) of sequence {seq_id} with {length} positions")
