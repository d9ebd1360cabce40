"""Threads for work on texts: parsing large bodies, rendering conversations, tokenising.

Small work has a thread of its own, so it never waits for large work. In each lane clients take turns, and the pieces of
work of each client are bounded. Work that has begun can't be stopped: its size is bounded instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from speculant.serving.errors import overloaded, unavailable
from speculant.structured import ClientLane

T = TypeVar("T")
LARGE = 32_768  # bytes of a body that count as large
_MOST_SMALL = 1024  # pieces of small work of one client; as many requests wait in an engine by default
_LONGEST_REST = 0.25  # seconds between pieces of large work


class TextLane:
    """One thread, in which clients take turns. For use in any thread."""

    def __init__(self, name: str, most: int, longest_rest: float = 0.0) -> None:
        """most: pieces of work that one client may have here, waiting and running.

        longest_rest: after each piece the thread pauses for as long as the piece took, up to this many seconds. Without
        pauses, work that holds the interpreter's lock would leave no time for the engine and the event loop.
        """
        self._lane, self._longest_rest = ClientLane(name), longest_rest
        self._most, self._lock, self._closed = most, Lock(), False
        self._held: dict[str, set[Future[Any]]] = {}  # work that has not ended, by client

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Return the future result of `work`. Work that is cancelled before it begins never runs.

        Raises ApiError if the client has too much work here (429), or after `close` (503).
        """
        future: Future[T] = Future()
        call = partial(self._run, future, work)
        with self._lock:
            if self._closed:
                raise unavailable("The server is shutting down.", "shutting_down")
            if len(self._held.get(client, ())) >= self._most:
                raise overloaded(
                    f"At most {self._most} requests of one client may wait here for their texts to be read. "
                    "Try again later."
                )
            self._lane.submit(client, call)
            self._held.setdefault(client, set()).add(future)
        future.add_done_callback(partial(self._release, client, call))
        return future

    def close(self) -> None:
        """Cancel the waiting work, and end the thread after the work that runs."""
        with self._lock:
            self._closed = True
            held = [future for each in self._held.values() for future in each]
        for future in held:
            future.cancel()
        self._lane.close()

    def _run(self, future: Future[T], work: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)
        if self._longest_rest:
            time.sleep(min(time.monotonic() - began, self._longest_rest))

    def _release(self, client: str, call: Callable[[], None], future: Future[Any]) -> None:
        """Forget work that has ended or was cancelled."""
        if future.cancelled():
            self._lane.withdraw(client, call)
        with self._lock:
            self._held[client].discard(future)
            if not self._held[client]:
                del self._held[client]


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
