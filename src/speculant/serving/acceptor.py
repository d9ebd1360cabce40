"""Accepts connections within bounds, and goes on after errors of the system."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress

from speculant.serving.connections import Connections, Rarely
from speculant.serving.http1 import Address, HttpConnection
from speculant.serving.wire import raw_error

_AT_ONCE = 8  # connections that are accepted before other work of the loop
_PAUSE = 0.01  # seconds until the next try after an error
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts the connections of a listening socket.

    Reason: while the process has too many open files, asyncio's own server logs hundreds of tracebacks a second.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        provisional: Connections,
        connect: Callable[[Address], HttpConnection],
    ) -> None:
        """provisional: the connections beyond the places. connect: returns the protocol of one from an address."""
        self._socket, self._connections, self._provisional = listening, connections, provisional
        self._connect = connect
        self._loop, self._rarely = asyncio.get_running_loop(), Rarely()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _resume(self) -> None:
        self._loop.add_reader(self._socket, self._accept_some)

    def _accept_some(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._wait_after(error)
                return
            self._take(accepted, address[:2])

    def _wait_after(self, error: OSError) -> None:
        """Drop waiting connections if there is no room, and try again later: the socket stays readable.

        Other errors are those of one connection or of the network, which open connections have no part in.
        """
        self._rarely.warn("can't accept connections, %s are open: %s", len(self._connections), error.strerror)
        for _ in range(_AT_ONCE if error.errno in _LACKS else 0):
            self._connections.make_room()
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(_PAUSE, self._resume)

    def _take(self, accepted: socket.socket, address: Address) -> None:
        connection, host = self._connect(address), address[0]
        for places in (self._connections, self._provisional):
            if places.add(connection, host):
                connection.begin(accepted, places)
                return
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            accepted.send(raw_error(self._connections.refusal(host)))
