"""A cache of equal slots: each sequence owns `max_len` consecutive rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, Slots
from speculant.errors import CapacityError


class SlottedKVCache:
    """`num_slots` sequences of at most `max_len` positions, allocated once.

    Storage is [layers, 2, num_slots * max_len, kv_heads, head_dim]; reading is a view, never a copy.
    """

    def __init__(self, shape: CacheShape, num_slots: int, max_len: int) -> None:
        self.max_len = max_len
        self._storage = _allocate(shape, num_slots * max_len)
        self._rows = torch.arange(num_slots * max_len, device=shape.device)
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._slot: dict[int, int] = {}
        self._length: dict[int, int] = {}

    def reserve(self, seq: int, n: int) -> Slots:
        """See `KVCache.reserve`."""
        start = self.length(seq)
        if start + n > self.max_len:
            raise CapacityError(
                f"sequence {seq} would hold {start + n} positions but a cache slot has {self.max_len}",
                "raise max_model_len or send a shorter prompt.",
            )
        first = self._slot_of(seq) * self.max_len + start
        self._length[seq] = start + n
        return Slots(seq, start, self._rows[first : first + n])

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVCache.write`."""
        self._storage[layer, 0].index_copy_(0, rows, keys)
        self._storage[layer, 1].index_copy_(0, rows, values)

    def read(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.read`."""
        first = self._slot[seq] * self.max_len
        both = self._storage[layer, :, first : first + self._length[seq]]
        return both[0], both[1]

    def length(self, seq: int) -> int:
        """See `KVCache.length`."""
        return self._length.get(seq, 0)

    def truncate_to(self, seq: int, n: int) -> None:
        """See `KVCache.truncate_to`."""
        if not 0 <= n <= self.length(seq):
            raise ValueError(f"truncate_to({n}) of sequence {seq} with {self.length(seq)} positions")
        if seq in self._length:
            self._length[seq] = n

    def keep_path(self, seq: int, base: int, path: Sequence[int]) -> None:
        """See `KVCache.keep_path`."""
        if not 0 <= base <= self.length(seq) or any(not 0 <= node < self.length(seq) - base for node in path):
            raise ValueError(f"keep_path({base}, {list(path)}) of sequence {seq} with {self.length(seq)} positions")
        if list(path) != list(range(len(path))):
            first = self._slot[seq] * self.max_len + base
            source = first + torch.tensor(path, device=self._rows.device)
            self._storage[:, :, first : first + len(path)] = self._storage[:, :, source]
        self.truncate_to(seq, base + len(path))

    def fork(self, src: int, dst: int) -> None:
        """See `KVCache.fork`."""
        if dst in self._slot:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        n = self.length(src)
        if n == 0:
            return
        source = self._slot[src] * self.max_len
        target = self.reserve(dst, n).rows
        self._storage[:, :, target] = self._storage[:, :, source : source + n]

    def release(self, seq: int) -> None:
        """See `KVCache.release`."""
        if seq in self._slot:
            self._free.append(self._slot.pop(seq))
            del self._length[seq]

    def free_tokens(self) -> int:
        """See `KVCache.free_tokens`."""
        return len(self._free) * self.max_len

    def check(self) -> None:
        """See `KVCache.check`."""
        used = list(self._slot.values())
        assert sorted(used + self._free) == list(range(self._num_slots)), "a slot is lost or doubled"
        assert self._slot.keys() == self._length.keys(), "a slot without a length"
        assert all(0 <= n <= self.max_len for n in self._length.values()), "a length out of range"

    def _slot_of(self, seq: int) -> int:
        if seq not in self._slot:
            if not self._free:
                raise CapacityError(
                    f"all {self._num_slots} cache slots are taken", "raise max_num_seqs or wait for a request to end."
                )
            self._slot[seq] = self._free.pop()
            self._length[seq] = 0
        return self._slot[seq]


def _allocate(shape: CacheShape, rows: int) -> Tensor:
    size = (shape.num_layers, 2, rows, shape.num_kv_heads, shape.head_dim)
    try:
        return torch.empty(size, dtype=shape.dtype, device=shape.device)
    except RuntimeError as error:
        needed = rows * shape.bytes_per_token / 2**30
        raise CapacityError(
            f"the KV cache needs {needed:.2f} GiB for {rows} positions and the allocation failed ({error})",
            "lower max_num_seqs or max_model_len.",
        ) from error
