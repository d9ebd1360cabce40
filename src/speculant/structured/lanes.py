"""Threads that work for several clients: each client in turn."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class ClientLane:
    """Runs calls in threads. A client's calls wait for each other, not for those of other clients.

    num_threads: calls that run at a time. One of each client runs at a time; without a name it is no single client, and
    may have all threads. stack_bytes: of each thread; 0 = the system's default. Any thread may use it.
    """

    def __init__(self, name: str, num_threads: int = 1, stack_bytes: int = 0) -> None:
        self._name, self._num_threads, self._stack_bytes = name, num_threads, stack_bytes
        self._queues: OrderedDict[str, deque[Call]] = OrderedDict()  # the client at the front has the next turn
        self._running: Counter[str] = Counter()
        self._lock, self._started = threading.Lock(), False
        self._pool = ThreadPoolExecutor(num_threads, name)

    def submit(self, client: str, call: Call) -> None:
        """Queue a call of a client. Raises RuntimeError after `close`."""
        with self._lock:
            if not self._started:
                self._start()
            self._pool.submit(self._run)
            self._queues.setdefault(client, deque()).append(call)

    def withdraw(self, client: str, call: Call) -> None:
        """Forget a call, if it has not begun."""
        with self._lock:
            calls = self._queues.get(client)
            if calls is not None and call in calls:
                calls.remove(call)
                if not calls:
                    del self._queues[client]

    def close(self) -> None:
        """Take no more calls, and end the threads after those that were submitted."""
        self._pool.shutdown(wait=False)

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

    def _start(self) -> None:
        """Start the threads, all of which have the size of stack that is set meanwhile."""
        all_there, before = threading.Barrier(self._num_threads), threading.stack_size(self._stack_bytes)
        try:
            list(self._pool.map(lambda _: all_there.wait(), range(self._num_threads)))
            self._started = True
        finally:
            threading.stack_size(before)
            all_there.abort()  # if one could not be started, the others wait no longer
