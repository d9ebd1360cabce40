"""Threads for work on texts: parsing large bodies, rendering conversations, tokenising.

Small work has a thread of its own, so it never waits for large work. In each lane clients take turns, and the pieces of
work of each client are bounded. Work that has begun can't be stopped: its size is bounded instead.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from speculant.serving.errors import overloaded, unavailable

T = TypeVar("T")
LARGE = 32_768  # bytes of a body that count as large
_MOST_SMALL = 256  # pieces of small work of one client
_LONGEST_REST = 0.25  # seconds between pieces of large work


class TextLane:
    """One thread, in which clients take turns. For use in any thread."""

    def __init__(self, name: str, most: int, longest_rest: float = 0.0) -> None:
        """most: pieces of work that one client may have here, waiting and running.

        longest_rest: after each piece the thread pauses for as long as the piece took, up to this many seconds. Without
        pauses, work that holds the interpreter's lock would leave no time for the engine and the event loop.
        """
        self._thread = ThreadPoolExecutor(1, name)
        self._longest_rest = longest_rest
        self._most, self._lock, self._closed = most, Lock(), False
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._held: dict[str, int] = {}  # pieces of work, by client

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Return the future result of `work`. Work that is cancelled before it begins never runs.

        Raises ApiError if the client has too much work here (429), or after `close` (503).
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise unavailable("The server is shutting down.", "shutting_down")
            if self._held.get(client, 0) >= self._most:
                raise overloaded(
                    f"At most {self._most} requests of one client may wait here for their texts to be read. "
                    "Try again later."
                )
            self._held[client] = self._held.get(client, 0) + 1
            self._waiting.setdefault(client, deque()).append((future, work))
            self._thread.submit(self._run_next)
        future.add_done_callback(partial(self._release, client))
        return future

    def close(self) -> None:
        """Cancel the waiting work, and end the thread after the work that runs."""
        with self._lock:
            self._closed = True
            waiting = [future for each in self._waiting.values() for future, _ in each]
        for future in waiting:
            future.cancel()
        self._thread.shutdown(wait=False)

    def _run_next(self) -> None:
        """Run the first piece of work of the client whose turn it is."""
        with self._lock:
            if not self._waiting:  # it was cancelled
                return
            client, items = self._waiting.popitem(last=False)
            future, work = items.popleft()
            if items:
                self._waiting[client] = items  # its next turn comes after those of all others
        if not future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)
        if self._longest_rest:
            time.sleep(min(time.monotonic() - began, self._longest_rest))

    def _release(self, client: str, future: Future[Any]) -> None:
        """Forget work that has ended or was cancelled."""
        with self._lock:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
            left = deque(item for item in self._waiting.get(client, ()) if item[0] is not future)
            if left:
                self._waiting[client] = left
            else:
                self._waiting.pop(client, None)


class TextLanes:
    """The lanes of a server: one for small work, one for large."""

    def __init__(self, most_large: int) -> None:
        """most_large: pieces of large work that one client may have, waiting and running."""
        self._small = TextLane("speculant-text", _MOST_SMALL)
        self._large = TextLane("speculant-large-text", most_large, _LONGEST_REST)

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Return the future result of a client's work on a text or body of a size; see `TextLane.submit`."""
        return (self._large if size > LARGE else self._small).submit(client, work)

    def close(self) -> None:
        """End the threads; see `TextLane.close`."""
        self._small.close()
        self._large.close()
