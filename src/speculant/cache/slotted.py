"""A block manager with one block per sequence: each owns `max_len` consecutive slots."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from speculant.cache.base import NO_MOVES, Moves, Slots, require_path
from speculant.errors import CapacityError


class SlottedBlockManager:
    """A `BlockManager` for `num_seqs` sequences of at most `max_len` positions.

    A sequence's slots are consecutive, so reads need no copy. Blocks are not shared: prefixes are not indexed, and a
    fork is a copy. Layers with a window keep all positions too, because a sequence has one block for all layers.
    """

    num_groups = 1

    def __init__(self, num_seqs: int, max_len: int) -> None:
        self.max_len = self.block_size = max_len
        self.num_blocks = num_seqs
        self._free = list(range(num_seqs - 1, -1, -1))
        self._block: dict[int, int] = {}
        self._length: dict[int, int] = {}

    def reserve(self, seq_id: int, n: int) -> Slots:
        """See `BlockManager.reserve`."""
        start = self.length(seq_id)
        if start + n > self.max_len:
            raise CapacityError(
                f"sequence {seq_id} would hold {start + n} positions but its cache block has {self.max_len}",
                "raise max_model_len or send a shorter prompt.",
            )
        if n == 0:
            return Slots(seq_id, start, ())
        first = self._block_of(seq_id) * self.max_len + start
        self._length[seq_id] = start + n
        return Slots(seq_id, start, range(first, first + n))

    def plan(self) -> SlottedPlan:
        """See `BlockManager.plan`."""
        room = {seq_id: self.max_len - length for seq_id, length in self._length.items()}
        return SlottedPlan(room, self.max_len, len(self._free))

    def table(self, seq_id: int) -> array[int]:
        """See `BlockManager.table`."""
        return array("q", [self._block[seq_id]] if seq_id in self._block else [])

    def length(self, seq_id: int) -> int:
        """See `BlockManager.length`."""
        return self._length.get(seq_id, 0)

    def truncate_to(self, seq_id: int, n: int) -> None:
        """See `BlockManager.truncate_to`."""
        if not 0 <= n <= self.length(seq_id):
            raise ValueError(f"truncate_to({n}) of sequence {seq_id} with {self.length(seq_id)} positions")
        if seq_id in self._length:
            self._length[seq_id] = n

    def holds_window(self, seq_id: int, n: int) -> bool:
        """See `BlockManager.holds_window`; all positions are kept."""
        return True

    def drop_unseen(self, seq_id: int) -> None:
        """See `BlockManager.drop_unseen`; all positions are kept."""

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> Moves:
        """See `BlockManager.compact`."""
        require_path(seq_id, self.length(seq_id), base, path)
        moves = NO_MOVES
        if path and path[-1] >= len(path):  # else they are in place
            first = self._block[seq_id] * self.max_len + base
            moves = Moves([first + node for node in path], range(first, first + len(path)))
        self.truncate_to(seq_id, base + len(path))
        return moves

    def fork(self, src: int, dst: int) -> Moves:
        """See `BlockManager.fork`."""
        if dst in self._block:
            raise ValueError(f"fork to sequence {dst}, which is already held")
        n = self.length(src)
        if n == 0:
            return NO_MOVES
        first = self._block[src] * self.max_len
        return Moves(range(first, first + n), self.reserve(dst, n).slots)

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """See `BlockManager.match_prefix`."""
        if seq_id in self._block:
            raise ValueError(f"match_prefix for sequence {seq_id}, which is already held")
        return 0

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """See `BlockManager.insert_prefix`."""

    def forget_prefixes(self) -> bool:
        """See `BlockManager.forget_prefixes`; there are none."""
        return True

    def release(self, seq_id: int) -> None:
        """See `BlockManager.release`."""
        if seq_id in self._block:
            self._free.append(self._block.pop(seq_id))
            del self._length[seq_id]

    def free_tokens(self) -> int:
        """See `BlockManager.free_tokens`."""
        return len(self._free) * self.max_len

    def check(self) -> None:
        """See `BlockManager.check`."""
        used = list(self._block.values())
        assert sorted(used + self._free) == list(range(self.num_blocks)), "a block is lost or doubled"
        assert self._block.keys() == self._length.keys(), "a block without a length"
        assert all(0 <= n <= self.max_len for n in self._length.values()), "a length out of range"

    def _block_of(self, seq_id: int) -> int:
        if seq_id not in self._block:
            if not self._free:
                raise CapacityError(
                    f"all {self.num_blocks} cache blocks are taken", "raise max_num_seqs or wait for a request to end."
                )
            self._block[seq_id] = self._free.pop()
            self._length[seq_id] = 0
        return self._block[seq_id]


class SlottedPlan:
    """A `ReservationPlan`: the room left in each sequence's block, and the number of free blocks."""

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
