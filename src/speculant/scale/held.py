"""Which of the texts that a router sent to a replica are still in the replica's memory.

A cache evicts the prefixes that were used longest ago, so one time says what is gone: a text is lost if all requests
that came as early, or earlier, ended before the newest prefix that was evicted was used for the last time.

    came     a    b    c                    evicted: what ended before |
    ended         a         b    |    c     gone: what came before c
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GONE = "gone_before"  # in a replica's routing statistics
MARGIN_S = 1.0  # between a router's clock and a replica's, and between their times for a request
_MOST = 65_536  # requests that are remembered


class HeldPrefixes:
    """The times of a replica's requests."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running: dict[object, float] = {}  # when requests came
        self._ended = deque[tuple[float, float]](maxlen=_MOST)  # when they ended, in order, and when they came
        self._gone = float("-inf")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Note a request, from its arrival to its end."""
        request, came = object(), self._now()
        self._running[request] = came
        try:
            yield
        finally:
            del self._running[request]
            self._ended.append((self._now(), came))

    def gone_before(self, evicted_until: float) -> float:
        """Return the time, in seconds since the epoch, before which no text came that is still held; 0 = unknown.

        evicted_until: see `BlockPool`. A replica's answers never fall.
        """
        if not evicted_until:
            return 0.0
        while self._ended and self._ended[0][0] < evicted_until:
            self._ended.popleft()
        came = [*self._running.values(), *(came for _, came in self._ended), evicted_until]
        self._gone = max(self._gone, min(came))
        return round(time.time() - self._now() + self._gone - MARGIN_S)
