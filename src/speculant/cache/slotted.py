"""A cache of equal slots: each sequence owns `max_len` consecutive rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.base import BlockTable, CacheShape, Slots, require_path
from speculant.cache.storage import Storage
from speculant.errors import CapacityError


class SlottedKVCache:
    """`num_slots` sequences of at most `max_len` positions, allocated once.

    Reading is a view, never a copy. Nothing is shared: prefixes are not kept, and a fork is a copy.
    """

    def __init__(self, shape: CacheShape, num_slots: int, max_len: int) -> None:
        self.max_len = self.block_size = max_len
        self.num_blocks = num_slots
        self._storage = Storage(shape, num_slots * max_len, "lower max_num_seqs or max_model_len.")
        self._rows = torch.arange(num_slots * max_len, device=shape.device)
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot: dict[int, int] = {}
        self._length: dict[int, int] = {}

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `KVCache.reserve`."""
        start = self.length(seq_id)
        if start + n > self.max_len:
            raise CapacityError(
                f"sequence {seq_id} would hold {start + n} positions but a cache slot has {self.max_len}",
                "raise max_model_len or send a shorter prompt.",
            )
        if n == 0:
            return Slots(seq_id, start, (), self._rows.device)
        first = self._slot_of(seq_id) * self.max_len + start
        self._length[seq_id] = start + n
        return Slots(seq_id, start, range(first, first + n), self._rows.device)

    def plan(self) -> SlottedPlan:
        """See `KVCache.plan`."""
        room = {seq_id: self.max_len - length for seq_id, length in self._length.items()}
        return SlottedPlan(room, self.max_len, len(self._free))

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVCache.write`."""
        self._storage.write(layer, rows, keys, values)

    def read(self, layer: int, seq_id: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.read`."""
        first = self._slot[seq_id] * self.max_len
        keys, values = self._storage.layer(layer)
        return keys[first : first + self._length[seq_id]], values[first : first + self._length[seq_id]]

    def table(self, seq_id: int) -> BlockTable:
        """See `KVCache.table`: a slot is one block."""
        slot = self._slot.get(seq_id)
        blocks = torch.tensor([] if slot is None else [slot], dtype=torch.int64, device=self._rows.device)
        return BlockTable(blocks, self.max_len)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVCache.layer`."""
        return self._storage.layer(layer)

    def length(self, seq_id: int) -> int:
        """See `KVCache.length`."""
        return self._length.get(seq_id, 0)

    def truncate_to(self, seq_id: int, n: int) -> None:
        """See `KVCache.truncate_to`."""
        if not 0 <= n <= self.length(seq_id):
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {self.length(seq_id)} positions")
        if seq_id in self._length:
            self._length[seq_id] = n

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """See `KVCache.compact`."""
        require_path(seq_id, self.length(seq_id), base, path)
        if list(path) != list(range(len(path))):
            first = self._slot[seq_id] * self.max_len + base
            source = first + torch.tensor(path, device=self._rows.device)
            self._storage.move(source, self._rows[first : first + len(path)])
        self.truncate_to(seq_id, base + len(path))

    def fork(self, src: int, dst: int) -> None:
        """See `KVCache.fork`."""
        if dst in self._slot:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        n = self.length(src)
        if n == 0:
            return
        source = self._slot[src] * self.max_len
        self._storage.move(self._rows[source : source + n], self.reserve(dst, n).rows)

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> int:
        """See `KVCache.match_prefix`."""
        if seq_id in self._slot:
            raise ValueError(f"match_prefix for sequence {seq_id}, which is already held")
        return 0

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `KVCache.insert_prefix`."""

    def release(self, seq_id: int) -> None:
        """See `KVCache.release`."""
        if seq_id in self._slot:
            self._free.append(self._slot.pop(seq_id))
            del self._length[seq_id]

    def free_tokens(self) -> int:
        """See `KVCache.free_tokens`."""
        return len(self._free) * self.max_len

    def check(self) -> None:
        """See `KVCache.check`."""
        used = list(self._slot.values())
        assert sorted(used + self._free) == list(range(self.num_blocks)), "a slot is lost or doubled"
        assert self._slot.keys() == self._length.keys(), "a slot without a length"
        assert all(0 <= n <= self.max_len for n in self._length.values()), "a length out of range"

    def _slot_of(self, seq_id: int) -> int:
        if seq_id not in self._slot:
            if not self._free:
                raise CapacityError(
                    f"all {self.num_blocks} cache slots are taken", "raise max_num_seqs or wait for a request to end."
                )
            self._slot[seq_id] = self._free.pop()
            self._length[seq_id] = 0
        return self._slot[seq_id]


class SlottedPlan:
    """A `ReservationPlan`: what is left of each slot, and how many slots are free."""

    def __init__(self, room: dict[int, int], max_len: int, num_free: int) -> None:
        self._room, self._max_len, self._num_free = room, max_len, num_free

    def room(self, seq_id: int) -> int:
        """See `ReservationPlan.room`."""
        return self._room.get(seq_id, self._max_len if self._num_free else 0)

    def take(self, seq_id: int, n: int) -> bool:
        """See `ReservationPlan.take`."""
        left = self.room(seq_id) - n
        if n and left >= 0:
            if seq_id not in self._room:
                self._num_free -= 1
            self._room[seq_id] = left
        return left >= 0
