"""Threads for work on texts: parsing large bodies, rendering conversations, tokenising.

Small work has a thread of its own, so it never waits for large work. In each lane clients take turns, and the pieces of
work of each client are bounded. Work that has begun can't be stopped: its size is bounded instead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from speculant.serving.errors import overloaded, unavailable
from speculant.structured.lanes import ClientLane, LaneClosedError, LaneFullError

T = TypeVar("T")
LARGE = 32_768  # bytes of a body that count as large
_MOST_SMALL = 1024  # pieces of small work of one client; as many requests wait in an engine by default
_LONGEST_REST = 0.25  # seconds between pieces of large work


class TextLanes:
    """The lanes of a server: one for small work, one for large."""

    def __init__(self, most_large: int) -> None:
        """most_large: pieces of large work that one client may have, waiting and begun."""
        self._most_large = most_large
        self._small = ClientLane("speculant-text", most=_MOST_SMALL)
        self._large = ClientLane("speculant-large-text", most=most_large, longest_rest=_LONGEST_REST)

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Return the future result of a client's work on a text or body of a size. Cancelled work may never run.

        Raises ApiError if the client has too much work here (429), or after `close` (503).
        """
        try:
            return (self._large if size > LARGE else self._small).submit(client, work)
        except LaneFullError:
            most = self._most_large if size > LARGE else _MOST_SMALL
            raise overloaded(
                f"At most {most} requests of one client may wait here for their texts to be read. Try again later."
            ) from None
        except LaneClosedError:
            raise unavailable("The server is shutting down.", "shutting_down") from None

    def close(self) -> None:
        """Cancel the work that waits, and end the threads."""
        self._small.close()
        self._large.close()
