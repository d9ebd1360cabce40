"""What every KV cache does.

A cache holds, per sequence, one key and one value per layer for each position that has been fed.
Storage is flat: a position lives in a *row*, and a sequence knows its rows in order.

    sequence   [ committed positions | reserved by this pass ]
                0 .. start-1            start .. start+n-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
class Slots:
    """Where the next positions of one sequence go: `rows[i]` is the storage row of `start + i`."""

    seq: int
    start: int
    rows: Tensor  # [n] int64

    @property
    def end(self) -> int:
        """The sequence's length once these positions are written."""
        return self.start + len(self.rows)


class KVCache(Protocol):
    """Keys and values of many sequences.

    The rollback contract is seed 001 D6: after a pass, `truncate_to` or `keep_path` drops what was
    not accepted, and stale rows are overwritten by the next pass.
    """

    def reserve(self, seq: int, n: int) -> Slots:
        """Extend `seq` by n positions (n >= 0) and say where they go. An unknown sequence starts empty.

        Raises CapacityError when there is no room; the cache is then unchanged.
        """
        ...

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] in the given rows [T]."""
        ...

    def read(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of a sequence, in position order."""
        ...

    def length(self, seq: int) -> int:
        """Return how many positions are held; 0 for an unknown sequence."""
        ...

    def truncate_to(self, seq: int, n: int) -> None:
        """Forget every position from n on (rollback, seed 001 D6)."""
        ...

    def keep_path(self, seq: int, base: int, path: Sequence[int]) -> None:
        """Keep positions below `base` and, of the tree nodes behind it, those on `path`.

        Node i was written at position base + i; the kept ones are moved to base, base + 1, ...
        """
        ...

    def fork(self, src: int, dst: int) -> None:
        """Give the new sequence `dst` everything that `src` holds."""
        ...

    def release(self, seq: int) -> None:
        """Free a sequence; an unknown one is ignored."""
        ...

    def free_tokens(self) -> int:
        """Return how many positions could still be reserved by new sequences."""
        ...

    def check(self) -> None:
        """Assert the integrity of the bookkeeping; for tests, after every step."""
        ...
