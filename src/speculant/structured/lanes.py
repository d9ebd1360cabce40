"""Threads that work for several clients: each client in turn."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

logger = logging.getLogger(__name__)

STACK_BYTES = 256 * 2**20  # the grammar compiler recurses once per rule of a chain of rules

Call = Callable[[], None]


class ClientLane:
    """Runs calls in threads with large stacks. A client's calls wait for each other, not for those of other clients.

    num_threads: calls that run at a time. One of each client runs at a time; without a name it is no single client, and
    may have all threads. Any thread may use it.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._queues: OrderedDict[str, deque[Call]] = OrderedDict()  # the client at the front has the next turn
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def submit(self, client: str, call: Call) -> None:
        """Queue a call of a client."""
        with self._lock:
            self._queues.setdefault(client, deque()).append(call)
            pool = self._pool
        pool.submit(self._run)

    def _run(self) -> None:
        """Run calls until none may run: the thread that ends a client's call takes its next one."""
        while (taken := self._take()) is not None:
            client, call = taken
            try:
                call()
            except Exception:  # no other thread waits for the client's next call
                logger.exception("a call in the lane %s failed", self._name)
            with self._lock:
                self._running -= Counter((client,))

    def _take(self) -> tuple[str, Call] | None:
        with self._lock:
            for client, calls in self._queues.items():
                if self._running[client] < (1 if client else self._num_threads):
                    self._running[client] += 1
                    call = calls.popleft()
                    self._queues.move_to_end(client)
                    if not calls:
                        del self._queues[client]
                    return client, call
        return None

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        pool, all_there = ThreadPoolExecutor(self._num_threads, self._name), threading.Barrier(self._num_threads)
        before = threading.stack_size(STACK_BYTES)
        try:
            list(pool.map(lambda _: all_there.wait(), range(self._num_threads)))
        finally:
            threading.stack_size(before)
        return pool
