"""Engines that share a machine step one at a time, each for an equal part of the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary


class FairSteps:
    """Gives turns to the engines that have work: the next one goes to the engine that has used the least time.

    An engine that has had no work starts at the time that the others have reached (start-time fair queueing, Goyal et
    al. 1996), so a long rest earns it nothing. Between two steps an engine keeps the turn, unless another one waits
    that has used less: so an engine with short steps gets as much time as one with long steps.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used = WeakKeyDictionary[object, float]()  # seconds, by engine
        self._waiting = set[object]()
        self._holder: object | None = None
        self._level = 0.0  # the seconds that the engine whose turn it is had used before its step

    @contextmanager
    def turn(self, engine: object, has_more: Callable[[], bool]) -> Iterator[bool]:
        """Wait for an engine's turn, and charge the block's time to it; yield True.

        has_more: whether work is left after that.
        """
        self._take(engine)
        started, more = time.perf_counter(), False
        try:
            yield True
            more = has_more()
        finally:
            self._give(engine, time.perf_counter() - started, more)

    @contextmanager
    def idle_turn(self, engine: object, seconds: float) -> Iterator[bool]:
        """Yield whether no engine has work for this long; in the block it gets none. Its time is not charged."""
        self.leave(engine)  # a turn that its last step kept
        with self._changed:
            free = self._changed.wait_for(lambda: self._holder is None and not self._waiting, seconds)
            if free:
                self._holder = engine
        try:
            yield free
        finally:
            if free:
                self.leave(engine)

    def leave(self, engine: object) -> None:
        """Give up the turn of an engine that has ended; without one, do nothing."""
        with self._changed:
            if self._holder is engine:
                self._holder = None
                self._changed.notify_all()

    def _take(self, engine: object) -> None:
        with self._changed:
            if self._holder is not engine:
                self._used[engine] = max(self._used.get(engine, 0.0), self._level)
                self._waiting.add(engine)
                self._changed.wait_for(lambda: self._holder is None and engine is min(self._waiting, key=self._seconds))
                self._waiting.remove(engine)
                self._holder = engine
            self._level = max(self._level, self._used[engine])

    def _give(self, engine: object, seconds: float, more: bool) -> None:
        with self._changed:
            self._used[engine] += seconds
            if not more or any(self._seconds(other) < self._used[engine] for other in self._waiting):
                self._holder = None
                self._changed.notify_all()

    def _seconds(self, engine: object) -> float:
        return self._used[engine]
