"""The bounds on a server's open connections: in all, and of each address."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from speculant.errors import ConfigError
from speculant.serving.clients import is_within, network_of
from speculant.serving.options import ServerOptions

logger = logging.getLogger(__name__)

_MOST = 4096  # connections by default, if the process may open more files
_RESERVE = 64  # file descriptors that are left to the engine, and to connections that are being closed
_MINUTE = 60.0


class OpenConnection(Protocol):
    """A connection to a client."""

    def drop(self) -> None:
        """Close the connection at once; unsent data is lost."""

    def check(self, now: float) -> None:
        """Close the connection if its client is late. now: the loop's time in seconds."""


class Connections:
    """All open connections. A newcomer may take the place of one that waits for its client's request.

    A connection waits from its beginning, and from the end of each answer, until its next request is complete. For use
    in one event loop.
    """

    def __init__(self, most: int, most_per_address: int, unbounded: tuple[str, ...] = ()) -> None:
        """most_per_address: 0 = no bound. unbounded: addresses and networks of proxies, which have no bound either."""
        self._most, self._most_per_address, self._unbounded = most, most_per_address, unbounded
        self._addresses: dict[OpenConnection, str] = {}
        self._counts: Counter[str] = Counter()  # connections of each address
        self._waiting: dict[str, dict[OpenConnection, None]] = {}  # the oldest one of each address first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: OpenConnection, host: str) -> bool:
        """Take a connection in. False = there is no place for it.

        If its address has as many as it may have, the oldest of them that waits is dropped. If all places are taken,
        the address with the most waiting connections loses its oldest one.
        """
        address = network_of(host)
        if self._counts[address] >= self._most_per_address > 0 and not is_within(host, self._unbounded):
            placed = self._drop_oldest(address)
        elif len(self) >= self._most:
            placed = self.make_room()
        else:
            placed = True
        if placed:
            self._addresses[connection] = address
            self._counts[address] += 1
            self.wait(connection)
        return placed

    def remove(self, connection: OpenConnection) -> None:
        """Forget a connection that is closed, if it is known."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._forget_waiting(connection, address)
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def wait(self, connection: OpenConnection) -> None:
        """Note that a connection waits for its client's request; one that waits already keeps its turn."""
        if (address := self._addresses.get(connection)) is not None:
            self._waiting.setdefault(address, {}).setdefault(connection)

    def work(self, connection: OpenConnection) -> None:
        """Note that a request is being answered, so that its connection keeps its place."""
        if (address := self._addresses.get(connection)) is not None:
            self._forget_waiting(connection, address)

    def make_room(self) -> bool:
        """Drop the oldest waiting connection of the address with the most of them. False = none waits."""
        if not self._waiting:
            return False
        return self._drop_oldest(max(self._waiting, key=lambda address: len(self._waiting[address])))

    def check(self, now: float) -> None:
        """Close the connections whose clients are late. now: the loop's time in seconds."""
        for connection in tuple(self._addresses):
            connection.check(now)

    def _drop_oldest(self, address: str) -> bool:
        waiting = self._waiting.get(address)
        if not waiting:
            return False
        oldest = next(iter(waiting))
        self.remove(oldest)
        oldest.drop()
        return True

    def _forget_waiting(self, connection: OpenConnection, address: str) -> None:
        waiting = self._waiting.get(address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(address, None)


def bounded_connections(options: ServerOptions) -> Connections:
    """Return the connections of a server, at first none.

    Raises ConfigError if there may be more of them than the process may open files.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        files = sys.maxsize
    room = files - min(_RESERVE, files // 2)
    most = min(_MOST, room) if options.max_connections is None else options.max_connections
    if most > room:
        raise ConfigError(
            f"max_connections={most} is too much for a process that may open {files} files",
            f"use at most {room}, or raise the process's limit first: ulimit -n {most + _RESERVE}.",
        )
    most_per_address = options.max_connections_per_address
    if most_per_address is None:
        most_per_address = max(1, most // 2)
    return Connections(most, most_per_address, options.trusted_proxies)


class Rarely:
    """Logs warnings that strangers can cause: at most one a minute, with the number of those that were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next, self._left_out = clock, float("-inf"), 0

    def warn(self, message: str, *arguments: Any) -> None:
        """Log a warning, unless there was one within a minute."""
        if self._clock() < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last report)" if self._left_out else ""
        logger.warning(message + more, *arguments)
        self._next, self._left_out = self._clock() + _MINUTE, 0
