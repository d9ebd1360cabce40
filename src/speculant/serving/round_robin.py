"""Calls functions of many clients in turn, so that no client waits for all the work of another one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_LONGEST = 2e-3  # seconds of such calls at a time


class RoundRobin:
    """Calls functions in the event loop: one of each client in turn, and those of one client in their order.

    After one call for each client, or after a short time, the loop does other work, such as work that calls have begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loop, self._clock, self._scheduled = loop, clock, False
        self._queues: dict[str, deque[Callable[[], None]]] = {}  # the client whose turn is next comes first

    def add(self, client: str, call: Callable[[], None]) -> None:
        """Call a function soon."""
        self._queues.setdefault(client, deque()).append(call)
        self._schedule()

    def _schedule(self) -> None:
        if self._queues and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = self._clock() + _LONGEST
        try:
            for _ in range(len(self._queues)):
                self._next()()
                if self._clock() >= end:
                    break
        finally:
            self._schedule()

    def _next(self) -> Callable[[], None]:
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        call = queue.popleft()
        if queue:
            self._queues[client] = queue
        return call
