"""The blocks of one replica's KV cache: those of running requests, and computed ones that are kept for later.

Sizes are in blocks. A prefix is kept or evicted as a whole. The other blocks of an ended request serve nobody here, but
they take room until they are the oldest, as in the engine.
"""

from __future__ import annotations

from collections import OrderedDict

Key = str | int


class PrefixStore:
    """Counts blocks. A known prefix has been computed; it is pinned while a running request uses it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._own = 0  # of running requests, beside pinned prefixes
        self._pins = dict[Key, int]()
        self._sizes = dict[Key, int]()  # of the pinned prefixes
        self._pinned = 0
        self._idle = OrderedDict[tuple[Key | None, int], int]()  # oldest first; None = of no shared prefix
        self._idle_blocks = 0
        self._ended = 0

    def knows(self, prefix: Key | None) -> bool:
        """Whether a prefix has been computed, and is not evicted."""
        return prefix is not None and (prefix in self._pins or (prefix, 0) in self._idle)

    def fits(self, own: int, prefix: Key | None) -> bool:
        """Whether a request fits, with its own blocks and a known prefix."""
        unpinned = 0 if prefix is None else self._idle.get((prefix, 0), 0)
        return self._own + self._pinned + unpinned + own <= self.capacity

    def take(self, own: int) -> None:
        """Give a request blocks of its own, and evict the oldest kept ones where they are needed."""
        self._own += own
        while self._own + self._pinned + self._idle_blocks > self.capacity:
            _, size = self._idle.popitem(last=False)
            self._idle_blocks -= size

    def give_back(self, own: int) -> None:
        """Take back blocks that a request has not used, as a known prefix replaces them."""
        self._own -= own

    def pin(self, prefix: Key, size: int) -> None:
        """Hold a known prefix for a request."""
        if prefix not in self._pins:
            self._idle_blocks -= self._idle.pop((prefix, 0), 0)
            self._sizes[prefix] = size
            self._pinned += size
        self._pins[prefix] = self._pins.get(prefix, 0) + 1

    def publish(self, prefix: Key, size: int) -> None:
        """Hold a prefix that a request has computed in blocks of its own; a known one replaces these blocks."""
        self._own -= size
        self.pin(prefix, size)

    def release(self, own: int, prefix: Key | None) -> None:
        """Take back the blocks of an ended request, and keep them as the newest; prefix: the one it holds."""
        self._own -= own
        self._ended += 1
        self._keep((None, self._ended), own)
        if prefix is not None:
            self._pins[prefix] -= 1
            if not self._pins[prefix]:
                del self._pins[prefix]
                size = self._sizes.pop(prefix)
                self._pinned -= size
                self._keep((prefix, 0), size)

    def _keep(self, key: tuple[Key | None, int], size: int) -> None:
        if size:
            self._idle[key] = size
            self._idle_blocks += size

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        assert self._idle_blocks == sum(self._idle.values()), "idle blocks"
        assert self._pinned == sum(self._sizes.values()), "pinned blocks"
        assert self._own >= 0, "blocks of requests"
        assert self._own + self._pinned + self._idle_blocks <= self.capacity, "capacity"
