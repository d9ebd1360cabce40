"""Calls functions of many clients in turn, so that no client waits for all the work of another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class RoundRobin:
    """Calls functions in the event loop: one of each client in turn, and those of one client in their order.

    After each call the loop does other work, such as work that the call has begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._scheduled = loop, False
        self._queues: dict[str, dict[object, Callable[[], None]]] = {}  # the client whose turn is next comes first

    def add(self, client: str, owner: object, call: Callable[[], None]) -> None:
        """Call a function soon, unless its owner already waits for the call of one."""
        self._queues.setdefault(client, {}).setdefault(owner, call)
        self._schedule()

    def has(self, client: str, owner: object) -> bool:
        """Whether an owner waits for the call of its function."""
        return owner in self._queues.get(client, ())

    def withdraw(self, client: str, owner: object) -> None:
        """Forget the function of an owner, if it has one."""
        queue = self._queues.get(client, {})
        if queue.pop(owner, None) is not None and not queue:
            del self._queues[client]

    def _schedule(self) -> None:
        if self._queues and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if not self._queues:
            return
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        call = queue.pop(next(iter(queue)))
        if queue:
            self._queues[client] = queue
        try:
            call()
        finally:
            self._schedule()
