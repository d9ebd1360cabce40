"""One connection to a client: uvicorn's HTTP/1.1, with deadlines and bounds against attacks.

The client's deadlines: header_timeout for the head of each request, body_timeout for its body, send_timeout to read.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from speculant.serving.clients import network_of
from speculant.serving.connections import Connections
from speculant.serving.errors import ApiError, refusal, unavailable
from speculant.serving.options import PROBED_PATHS, ServerOptions
from speculant.serving.request_heads import (
    ChunkCount,
    blank_line,
    check_head,
    check_request,
    find_head,
    headers_too_large,
)
from speculant.serving.round_robin import RoundRobin
from speculant.serving.streams import ABORT
from speculant.serving.wire import event, raw_error

_PIECE = 16 * 2**10  # bytes that are received and parsed at a time
_MOST_EVENTS = 32  # that are parsed at a time: heads, and parts of bodies
_LEAST_READ = 64 * 2**10  # bytes of an answer that a client has to read within send_timeout
_END = getattr(select, "POLLRDHUP", 0)  # where it is missing, only a connection that is closed both ways is noticed
_CLOSE = (b"connection", b"close")
_LINGER = 1.0  # seconds of discarding the rest of a refused request, so that the client reads the answer
_PROVISIONALLY = 5.0  # seconds that a connection beyond the places may take for the head of its request and its answer


Address = tuple[str, int]  # host and port


@dataclass(frozen=True)
class Surroundings:
    """The parts of a server that all its connections share."""

    config: uvicorn.Config
    state: UvicornState
    options: ServerOptions
    connections: Connections
    turns: RoundRobin


class HttpConnection(H11Protocol, asyncio.BufferedProtocol):
    """A connection with deadlines: its client can't keep it open without use. A request can close it (`ABORT`)."""

    transport: Any  # None before the connection is made
    cycle: Any  # None before the first request
    conn: _CheckedHttp

    def __init__(self, server: Surroundings, app_state: dict[str, Any], address: Address) -> None:
        """address: the client's. The system does not tell it any more once the client has reset the connection."""
        super().__init__(server.config, server.state, app_state)
        self._options, self._turns = server.options, server.turns
        self._places = self._connections = server.connections  # the latter has taken this connection in
        self._address, self._network = address, network_of(address[0])  # networks take turns
        self._accepted: socket.socket | None = None  # while it waits for its turn to begin
        self.conn = _CheckedHttp(server.options.max_header_bytes, self._refuse)
        self._received = bytearray()  # and not parsed yet
        self._deadline: float | None = None  # of the next head, in the loop's time
        self._unread: tuple[int, float] | None = None  # bytes of an answer that the client had not read, and when
        self._ends: float | None = None  # when a connection beyond the places is closed, in the loop's time
        self._dropped = self._refused = self._sends_events = False

    def begin(self, accepted: socket.socket, connections: Connections) -> None:
        """Begin, in the client's turn, with an accepted socket. connections: those that have taken this one in."""
        self._accepted, self._connections = accepted, connections
        if connections is not self._places:
            self._ends, self.conn.admit = self.loop.time() + _PROVISIONALLY, self._admit
        self._turns.add(self._network, self, self._begin)

    def _begin(self) -> None:
        assert self._accepted is not None
        self._beginning = self.loop.create_task(self._connect(self._accepted))
        self._accepted = None

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: self, accepted)
        except OSError:  # the client has gone
            self._connections.remove(self)
            accepted.close()

    # --- asyncio's events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.client = self._address
        inner: Any = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._sends_events = _has_events(message)
                await send(message)

            scope.setdefault("extensions", {})[ABORT] = transport.abort
            await inner(scope, receive, send_noted)

        self.app = cast(Any, app)
        if self._dropped:
            transport.abort()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it if the client has reset the connection
        self._connections.remove(self)
        self._turns.withdraw(self._network, self)
        self.conn.refuse, self.conn.admit = _ignore, _unchanged  # without the others the buffers are freed at once

    def get_buffer(self, sizehint: int) -> bytearray:
        """See `asyncio.BufferedProtocol`."""
        self._space = bytearray(_PIECE)
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        """Keep received data until it is this connection's turn."""
        self._received += memoryview(self._space)[:nbytes]
        self._take_turn()

    def _take_turn(self) -> None:
        self.transport.pause_reading()
        self._turns.add(self._network, self, self._parse)

    @property
    def _has_turn(self) -> bool:
        return self._turns.has(self._network, self)

    def _parse(self) -> None:
        data, self._received = bytes(self._received), bytearray()
        if self.transport.is_closing():
            return
        if not self._refused:
            try:
                self._handle(data)
            except Exception:
                self.transport.abort()
                raise
        if self._refused or not (self._has_turn or self.flow.read_paused):
            self.transport.resume_reading()

    def _handle(self, data: bytes) -> None:
        """Parse data, and pass the events on to uvicorn. Many events take more than one turn."""
        if data:  # to h11 no data are the connection's end
            self.conn.receive_data(data)
        self.conn.events_left = _MOST_EVENTS
        super().handle_events()
        self._follow()
        if not (self.conn.events_left or self._refused):
            self._take_turn()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._unread = None
        super().resume_writing()

    # --- uvicorn's events

    def handle_events(self) -> None:
        """Let the next request, if it has arrived, begin in its turn."""
        if self.conn.trailing_data[0]:
            self._take_turn()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, which may have arrived."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # header_timeout counts instead
        self._follow()

    def shutdown(self) -> None:
        """Close the connection once its answer is complete."""
        if self._refused:
            self.transport.close()
        else:
            super().shutdown()

    def _should_upgrade(self) -> bool:
        return False  # requests to change the protocol are answered as HTTP/1.1, without a warning for each

    # --- bounds

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _follow(self) -> None:
        """Note whether the connection waits for its client, and until when."""
        if self._refused:
            return
        if self._answering:
            self._deadline = None
        elif self._deadline is None and self._options.header_timeout is not None:
            self._deadline = self.loop.time() + self._options.header_timeout
        if self._answering and self.conn.their_state is not h11.SEND_BODY:
            self._connections.work(self)
        else:
            self._connections.wait(self)

    def _admit(self, request: h11.Request) -> h11.Request:
        """Let a probe have its answer, after which the connection ends. Take a place for another request."""
        if request.target.partition(b"?")[0].decode("ascii") in PROBED_PATHS:
            headers, version = [*request.headers, _CLOSE], request.http_version
            return h11.Request(method=request.method, headers=headers, target=request.target, http_version=version)
        if not self._places.claim(self, self._address[0]):
            raise self._places.refusal(self._address[0])
        self._connections.remove(self)
        self._connections, self._ends, self.conn.admit = self._places, None, _unchanged
        return request

    def _end_answer(self) -> None:
        """Tell the client that its request ends, unless an answer in another form than events has begun."""
        error = unavailable("This connection is needed for another request. Try again later.", "connection_taken")
        if not self.cycle.response_started:
            self.transport.write(raw_error(error))
        elif self._sends_events and self.conn.our_state is h11.SEND_BODY:
            for each in (h11.Data(data=event(error.body())), h11.EndOfMessage()):
                self.transport.write(self.conn.send(each))
        self.cycle.disconnected = True  # nothing else may be sent

    def drop(self) -> None:
        """See `OpenConnection.drop`."""
        self._dropped = True
        self._connections.remove(self)
        if self.transport is not None:
            if self._answering and not (self._refused or self.transport.get_write_buffer_size()):
                self._end_answer()
            self.transport.abort()
        elif self._accepted is not None:
            self._turns.withdraw(self._network, self)
            self._accepted.close()

    def check(self, now: float) -> None:
        """See `OpenConnection.check`."""
        if self._ends is not None and now >= self._ends:
            self.drop()
        if self.transport is None:
            return
        late = self._deadline is not None and now >= self._deadline
        waits_for_us = self._has_turn and not self._refused
        if late and not waits_for_us and not self.transport.is_closing():
            if not self._refused and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                self._refuse(ApiError(408, "The headers did not arrive in time.", code="timeout"))
            else:
                self.transport.close()
        self._check_unread(now)
        if self._answering and self.flow.read_paused and _has_left(self.transport.get_extra_info("socket")):
            self.drop()

    def _check_unread(self, now: float) -> None:
        """Drop the connection if the client has not read enough of an answer that is over, or that can't go on."""
        left = self.transport.get_write_buffer_size()
        grows = self._answering and not (self.flow.write_paused or self._refused)
        if not left or grows:
            self._unread = None
        elif self._unread is None or left <= self._unread[0] - _LEAST_READ:
            self._unread = left, now
        elif self._options.send_timeout is not None and now - self._unread[1] >= self._options.send_timeout:
            self.drop()

    def _refuse(self, error: ApiError) -> None:
        """Answer a malformed request, discard what follows for a second, and close the connection."""
        if self._refused:
            return
        self._refused = True
        if self._answering:  # the body is malformed
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else the request's answer has begun
            self.transport.write(raw_error(error))
        self.transport.write_eof()
        self._unset_keepalive_if_required()
        self._deadline = self.loop.time() + _LINGER
        self._connections.wait(self)


class _CheckedHttp(h11.Connection):
    """h11's parser, with further checks. A malformed request is refused, instead of an error for uvicorn to log."""

    def __init__(self, most_head_bytes: int, refuse: Callable[[ApiError], None]) -> None:
        super().__init__(h11.SERVER, most_head_bytes)
        self._most, self.refuse, self._chunks = most_head_bytes, refuse, ChunkCount()
        self.admit: Callable[[h11.Request], h11.Request] = _unchanged  # raises ApiError for a request without a place
        self.events_left, self._has_blank = 0, False  # before the request

    def next_event(self) -> Any:
        """See `h11.Connection.next_event`. If no events are left for this turn, it seems to need more data."""
        if not self.events_left:
            return h11.NEED_DATA
        self.events_left -= 1
        try:
            return self._checked_event()
        except ApiError as error:
            self.refuse(error)
        except h11.RemoteProtocolError as error:
            too_large = error.error_status_hint == 431
            self.refuse(headers_too_large(self._most) if too_large else refusal(f"This is not HTTP/1.1: {error}."))
        return h11.NEED_DATA

    def _checked_event(self) -> Any:
        if self.their_state is h11.IDLE:
            blank = 0 if self._has_blank else blank_line(self.trailing_data[0])
            if blank is None:
                return h11.NEED_DATA
            self._has_blank |= self._receive_buffer.maybe_extract_at_most(blank) is not None
            if (head := find_head(self.trailing_data[0])) is not None:
                check_head(head, self._most)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks, self._has_blank = ChunkCount(), False
            return self.admit(check_request(event))
        if isinstance(event, h11.Data):
            self._chunks.add(event)
        return event


def _has_left(client: socket.socket) -> bool:
    """Whether a client has closed its end, although data from it have not been read: its next requests."""
    looking = select.poll()
    looking.register(client, _END)
    return bool(looking.poll(0))


def _has_events(head: Message) -> bool:
    """Whether a response is a stream of server-sent events."""
    kinds = [value for name, value in head["headers"] if name == b"content-type"]
    return bool(kinds) and kinds[0].startswith(b"text/event-stream")


def _ignore(_: ApiError) -> None:
    pass


def _unchanged(request: h11.Request) -> h11.Request:
    return request
