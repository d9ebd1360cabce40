"""Threads that work for several clients: each client in turn, and each within its bound."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class LaneFullError(Exception):
    """A client has as many pieces of work in a lane as it may have there."""


class LaneClosedError(Exception):
    """A lane takes no more work."""


class ClientLane:
    """Does work in threads. A client's pieces of work wait for each other, not for those of other clients.

    One of each client is done at a time; without a name it is no single client, and may have all threads. Any thread
    may use a lane.
    """

    def __init__(
        self,
        name: str,
        num_threads: int = 1,
        stack_bytes: int = 0,
        most: int | None = None,
        longest_rest: float = 0.0,
    ) -> None:
        """num_threads: pieces of work that are done at a time. stack_bytes: of each; 0 = the system's default.

        most: pieces of work that one client may have here, waiting and begun; None = any number. longest_rest: after
        each piece the thread pauses for as long as the piece took, up to this many seconds. Without pauses, work that
        holds the interpreter's lock would leave no time for the engine and the event loop.
        """
        self._num_threads, self._stack_bytes, self._most = num_threads, stack_bytes, most
        self._longest_rest = longest_rest
        self._queues: OrderedDict[str, dict[Future[Any], Callable[[], Any]]] = OrderedDict()  # the next turn is first
        self._running, self._held = Counter[str](), Counter[str]()  # pieces by client: begun, and not ended
        self._lock, self._started, self._closed = threading.Lock(), False, False
        self._pool = ThreadPoolExecutor(num_threads, name)

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Return the future result of a client's work. Work that is cancelled before it begins never runs.

        Raises LaneFullError if the client has too much work here, and LaneClosedError after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise LaneClosedError
            if self._most is not None and self._held[client] >= self._most:
                raise LaneFullError
            if not self._started:
                self._start()
            self._pool.submit(self._run)
            self._queues.setdefault(client, {})[future] = work
            self._held[client] += 1
        future.add_done_callback(partial(self._forget, client))
        return future

    def close(self) -> None:
        """Cancel the work that has not begun, and end the threads after the work that has."""
        with self._lock:
            self._closed = True
            waiting = [future for each in self._queues.values() for future in each]
        for future in waiting:
            future.cancel()
        self._pool.shutdown(wait=False)

    def _forget(self, client: str, future: Future[Any]) -> None:
        """Forget work that has ended or was cancelled."""
        with self._lock:
            self._held -= Counter((client,))
            queue = self._queues.get(client, {})
            if queue.pop(future, None) is not None and not queue:
                del self._queues[client]

    def _run(self) -> None:
        """Work until nothing may begin: the thread that ends a client's piece takes its next one."""
        while (taken := self._take()) is not None:
            client, future, work = taken
            if future.set_running_or_notify_cancel():
                self._do(future, work)
            with self._lock:
                self._running -= Counter((client,))

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            for client, queue in self._queues.items():
                if self._running[client] < (1 if client else self._num_threads):
                    self._running[client] += 1
                    future = next(iter(queue))
                    work = queue.pop(future)
                    self._queues.move_to_end(client)
                    if not queue:
                        del self._queues[client]
                    return client, future, work
        return None

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)
        if self._longest_rest:
            time.sleep(min(time.monotonic() - began, self._longest_rest))

    def _start(self) -> None:
        """Start the threads, all of which have the size of stack that is set meanwhile."""
        all_there, before = threading.Barrier(self._num_threads), threading.stack_size(self._stack_bytes)
        try:
            list(self._pool.map(lambda _: all_there.wait(), range(self._num_threads)))
            self._started = True
        finally:
            threading.stack_size(before)
            all_there.abort()  # if one could not be started, the others wait no longer
