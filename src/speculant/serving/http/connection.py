"""One connection to a client: HTTP/1.1 on h11's parser, with deadlines and bounds against attacks.

The client's deadlines: header_timeout for the head of each request, body_timeout for its body, send_timeout to read.
A head is its first line and its headers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import select
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope
from typing_extensions import override

from speculant.serving.http.clients import Connections, OpenConnection, RoundRobin, network_of
from speculant.serving.options import PROBED_PATHS, ServerOptions
from speculant.serving.wire import ABORT, ApiError, error_event, raw_error, refusal, unavailable

logger = logging.getLogger(__name__)

_PIECE = 16 * 2**10  # bytes that are received and parsed at a time
_MOST_EVENTS = 32  # that are parsed at a time: heads, and parts of bodies
_MOST_BODY = 2**16  # bytes of a body that wait for the application before no more are received
_LEAST_READ = 64 * 2**10  # bytes of an answer that a client has to read within send_timeout
_LEFT = getattr(select, "POLLRDHUP", 0)  # where it is missing, only a connection that is closed both ways is noticed
_CLOSE = (b"connection", b"close")
_LINGER = 1.0  # seconds of discarding the rest of a refused request, so that the client reads the answer
_PROVISIONALLY = 5.0  # seconds that a connection beyond the places may take for the head of its request and its answer


Address = tuple[str, int]  # host and port


@dataclass
class Surroundings:
    """The parts of a server that all its connections share. tls: None = HTTP. date: the header of answers."""

    app: ASGIApp
    options: ServerOptions
    places: Connections
    turns: RoundRobin
    tls: ssl.SSLContext | None = None
    date: bytes = b""
    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Flow:
    """Whether a connection receives data, and whether its client reads."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._readable = transport, asyncio.Event()
        self._readable.set()
        self.read_paused = False

    @property
    def write_paused(self) -> bool:
        """Whether so much is unread that nothing more should be sent."""
        return not self._readable.is_set()

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive data again."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Let `drain` wait until `resume_writing`."""
        self._readable.clear()

    def resume_writing(self) -> None:
        """Let `drain` return."""
        self._readable.set()

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        await self._readable.wait()


class HttpExchange:
    """A request and its answer, between an application and a connection; see ASGI."""

    def __init__(self, connection: HttpConnection, scope: Scope) -> None:
        self._http, self._flow, self._transport = connection.http, connection.flow, connection.transport
        self._date, self.scope = connection.server.date, scope
        self._on_complete: Callable[[], None] = connection.on_response_complete
        self.disconnected, self.keep_alive = False, True
        self.waiting_for_100_continue = self._http.they_are_waiting_for_100_continue
        self.body, self.more_body, self.arrived = bytearray(), True, asyncio.Event()
        self.response_started = self.response_complete = self.sends_events = False

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer. If it fails, the answer says so, or ends with the connection."""
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.response_complete or self.disconnected):
                raise RuntimeError("the application ended without a whole response")
        except BaseException as error:
            logger.error("a request failed", exc_info=error)
            if self.response_started:
                self._transport.close()
            else:
                await self._send_failure()
        finally:
            self._on_complete = _nothing  # without the connection the buffers are freed at once

    async def _send_failure(self) -> None:
        headers = [(b"content-type", b"text/plain; charset=utf-8"), _CLOSE]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"Internal Server Error"})

    async def receive(self) -> Message:
        """Return the next part of the body, or that the client has disconnected."""
        if self.waiting_for_100_continue and not self._transport.is_closing():
            self._write(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
            self.waiting_for_100_continue = False
        if not (self.disconnected or self.response_complete):
            self._flow.resume_reading()
            await self.arrived.wait()
            self.arrived.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        if self.response_complete or message["type"] != expected:
            raise RuntimeError(f"the application sent {message['type']!r} out of order")
        if self.response_started:
            self._send_body(message)
        else:
            self._send_head(message)

    def _send_head(self, message: Message) -> None:
        self.response_started, self.waiting_for_100_continue = True, False
        headers = [(b"date", self._date), *message.get("headers", ())]
        kinds = [value for name, value in headers if name == b"content-type"]
        self.sends_events = bool(kinds) and kinds[0].startswith(b"text/event-stream")
        if _CLOSE in self.scope["headers"] and _CLOSE not in headers:
            headers.append(_CLOSE)
        status = message["status"]
        self._write(h11.Response(status_code=status, headers=headers, reason=_phrase(status)))

    def _send_body(self, message: Message) -> None:
        body = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        self._write(h11.Data(data=body))
        if message.get("more_body", False):
            return
        self.response_complete = True
        self.arrived.set()
        self._write(h11.EndOfMessage())
        if self._http.our_state is h11.MUST_CLOSE or not self.keep_alive:
            self._http.send(h11.ConnectionClosed())
            self._transport.close()
        self._on_complete()

    def _write(self, sent: Any) -> None:
        self._transport.write(self._http.send(sent))


class HttpConnection(asyncio.BufferedProtocol, OpenConnection):
    """A connection with deadlines: its client can't keep it open without use. A request can close it (`ABORT`)."""

    transport: Any = None  # before the connection is made
    flow: Flow
    cycle: HttpExchange | None = None  # before the first request

    def __init__(self, server: Surroundings, address: Address) -> None:
        """address: the client's. The system does not tell it any more once the client has reset the connection."""
        self.server, self.loop = server, asyncio.get_running_loop()
        self._options, self._turns = server.options, server.turns
        self._places = self._connections = server.places  # the latter has taken this connection in
        self._address, self._network = address, network_of(address[0])  # networks take turns
        self._accepted: socket.socket | None = None  # while it waits for its turn to begin
        self._most_head_bytes = server.options.max_header_bytes
        self.http, self._chunks = h11.Connection(h11.SERVER, self._most_head_bytes), ChunkCount()
        self._events_left, self._has_blank = 0, False  # of this turn; before the request
        self._received = bytearray()  # and not parsed yet
        self._deadline: float | None = None  # of the next head, in the loop's time
        self._unread: tuple[int, float] | None = None  # bytes of an answer that the client had not read, and when
        self._ends: float | None = None  # when a connection beyond the places is closed, in the loop's time
        self._dropped = self._refused = False

    def begin(self, accepted: socket.socket, connections: Connections) -> None:
        """Begin, in the client's turn, with an accepted socket. connections: those that have taken this one in."""
        self._accepted, self._connections = accepted, connections
        if connections is not self._places:
            self._ends = self.loop.time() + _PROVISIONALLY
        self._turns.add(self._network, self, self._begin)

    def _begin(self) -> None:
        assert self._accepted is not None
        self._beginning = self.loop.create_task(self._connect(self._accepted))
        self._accepted = None

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            tls, patience = self.server.tls, self._options.header_timeout
            seconds = patience if tls else None
            await self.loop.connect_accepted_socket(lambda: self, accepted, ssl=tls, ssl_handshake_timeout=seconds)
        except OSError:  # the client has gone
            self._connections.remove(self)
            accepted.close()

    # --- asyncio's events

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.flow = transport, Flow(transport)
        self.server.connections.add(self)
        if self._dropped:
            transport.abort()
        self._follow()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self.cycle is not None:
            self.cycle.disconnected |= not self.cycle.response_complete
            self.cycle.arrived.set()
        self.flow.resume_writing()
        self.transport.close()
        self._connections.remove(self)
        self._turns.withdraw(self._network, self)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        self._space = memoryview(bytearray(_PIECE))  # TLS writes into slices of it, which must not be copies
        return self._space

    @override
    def buffer_updated(self, nbytes: int) -> None:
        """Keep received data until it is this connection's turn."""
        self._received += self._space[:nbytes]
        self._take_turn()

    @override
    def pause_writing(self) -> None:
        self.flow.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._unread = None
        self.flow.resume_writing()

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

    # --- requests and answers

    def _handle(self, data: bytes) -> None:
        """Parse data, and pass the events on. Many events take more than one turn."""
        if data:  # to h11 no data are the connection's end
            self.http.receive_data(data)
        self._events_left = _MOST_EVENTS
        while (found := self._next_event()) is not h11.NEED_DATA:
            if found is h11.PAUSED:  # the next request waits for the end of this one's answer
                self.flow.pause_reading()
                break
            self._take(found)
            if isinstance(found, h11.EndOfMessage) and self.http.their_state is h11.MUST_CLOSE:
                break  # what follows the last request is no concern of ours
        self._follow()
        if not (self._events_left or self._refused):
            self._take_turn()

    def _next_event(self) -> Any:
        """Return the parser's next event. If none is left for this turn, it seems to need more data."""
        if not self._events_left:
            return h11.NEED_DATA
        self._events_left -= 1
        try:
            return self._checked_event()
        except ApiError as error:
            self._refuse(error)
        except h11.RemoteProtocolError as error:
            too_large, text = error.error_status_hint == 431, f"This is not HTTP/1.1: {error}."
            self._refuse(headers_too_large(self._most_head_bytes) if too_large else refusal(text))
        return h11.NEED_DATA

    def _checked_event(self) -> Any:
        """Return the parser's next event. Raises ApiError for a request that h11 accepts and this server does not."""
        if self.http.their_state is h11.IDLE:
            blank = 0 if self._has_blank else blank_line(self.http.trailing_data[0])
            if blank is None:
                return h11.NEED_DATA
            if blank:
                self._skip(blank)
            if (head := find_head(self.http.trailing_data[0])) is not None:
                check_head(head, self._most_head_bytes)
        found = self.http.next_event()
        if isinstance(found, h11.Request):
            self._chunks, self._has_blank = ChunkCount(), False
            request = check_request(found)
            return request if self._connections is self._places else self._admit(request)
        if isinstance(found, h11.Data):
            self._chunks.add(found)
        return found

    def _skip(self, count: int) -> None:
        """Begin anew, between two requests, without the first bytes of what was received."""
        rest = self.http.trailing_data[0][count:]
        self.http, self._has_blank = h11.Connection(h11.SERVER, self._most_head_bytes), True
        if rest:
            self.http.receive_data(rest)

    def _take(self, found: Any) -> None:
        """Take an event. After an answer that did not wait for its request's end, the rest of it is dropped."""
        if isinstance(found, h11.Request):
            self.cycle = HttpExchange(self, self._scope_of(found))
            task = self.loop.create_task(self.cycle.run(self.server.app))
            self.server.tasks.add(task)
            task.add_done_callback(self.server.tasks.discard)
            return
        cycle, is_over = self.cycle, self.http.our_state is h11.DONE
        assert cycle is not None, "a request comes before its body"
        if isinstance(found, h11.Data) and not is_over:
            cycle.body += found.data
            if len(cycle.body) > _MOST_BODY:
                self.flow.pause_reading()
            cycle.arrived.set()
        elif isinstance(found, h11.EndOfMessage) and is_over:
            self.transport.resume_reading()
            self.http.start_next_cycle()
        elif isinstance(found, h11.EndOfMessage):
            cycle.more_body = False
            cycle.arrived.set()

    def _scope_of(self, request: h11.Request) -> Scope:
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "server": self.transport.get_extra_info("sockname")[:2],
            "client": self._address,
            "scheme": "https" if self.server.tls else "http",
            "method": request.method.decode("ascii"),
            "root_path": "",
            "path": unquote(self._own(path).decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
            "state": {},
            "extensions": {ABORT: self.transport.abort},
        }

    def _own(self, path: bytes) -> bytes:
        """Return a path without the prefix that a proxy left in it."""
        root = self._options.root_path.encode()
        return path.removeprefix(root) if path.startswith(root + b"/") else path

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, which may have arrived."""
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
                self.http.start_next_cycle()
                if self.http.trailing_data[0]:
                    self._take_turn()
        self._follow()

    def shutdown(self) -> None:
        """Close the connection once its answer is complete."""
        if self._answering and not self._refused:
            assert self.cycle is not None
            self.cycle.keep_alive = False
        else:
            self.transport.close()

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
        if self._answering and self.http.their_state is not h11.SEND_BODY:
            self._connections.work(self)
        else:
            self._connections.wait(self)

    def _admit(self, request: h11.Request) -> h11.Request:
        """Let a probe have its answer, after which the connection ends. Take a place for another request."""
        if self._own(request.target.partition(b"?")[0]).decode("ascii") in PROBED_PATHS:
            headers, version = [*request.headers, _CLOSE], request.http_version
            return h11.Request(method=request.method, headers=headers, target=request.target, http_version=version)
        if not self._places.claim(self, self._address[0]):
            raise self._places.refusal(self._address[0])
        self._connections.remove(self)
        self._connections, self._ends = self._places, None
        return request

    def _end_answer(self, cycle: HttpExchange) -> None:
        """Tell the client that its request ends, unless an answer in another form than events has begun."""
        error = unavailable("This connection is needed for another request. Try again later.", "connection_taken")
        if not cycle.response_started:
            self.transport.write(raw_error(error, cycle.scope))
        elif cycle.sends_events and self.http.our_state is h11.SEND_BODY:
            for each in (h11.Data(data=error_event(error, cycle.scope)), h11.EndOfMessage()):
                self.transport.write(self.http.send(each))
        cycle.disconnected = True  # nothing else may be sent

    @override
    def drop(self) -> None:
        self._dropped = True
        self._connections.remove(self)
        if self.transport is not None:
            if self.cycle is not None and not (
                self.cycle.response_complete or self._refused or self.transport.get_write_buffer_size()
            ):
                self._end_answer(self.cycle)
            self.transport.abort()
        elif self._accepted is not None:
            self._turns.withdraw(self._network, self)
            self._accepted.close()

    @override
    def check(self, now: float) -> None:
        if self._ends is not None and now >= self._ends:
            self.drop()
        if self.transport is None:
            return
        late = self._deadline is not None and now >= self._deadline
        waits_for_us = self._has_turn and not self._refused
        if late and not waits_for_us and not self.transport.is_closing():
            if not self._refused and self.http.their_state is h11.IDLE and self.http.trailing_data[0]:
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
        if self.cycle is not None and self._answering:  # the body is malformed
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.arrived.set()
        if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else the request's answer has begun
            self.transport.write(raw_error(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.time() + _LINGER
        self._connections.wait(self)


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


def _has_left(client: socket.socket) -> bool:
    """Whether a client has closed its end, although data from it have not been read: its next requests."""
    looking = select.poll()
    looking.register(client, _LEFT)
    return bool(looking.poll(0))


def _nothing() -> None:
    pass


MOST_HEADERS = 128  # each takes time in the event loop
_HEAD_END = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(rb"^content-length:(.*)$", re.IGNORECASE | re.MULTILINE)
_ABSOLUTE = re.compile(rb"https?://[^/?]+", re.IGNORECASE)


def find_head(data: bytes) -> bytes | None:
    """Return the head that data begin with, up to its blank line; None = it is not complete."""
    end = _HEAD_END.search(data)
    return None if end is None else data[: end.end()]


def blank_line(data: bytes) -> int | None:
    """Return the bytes of an empty line before a request, which is ignored (RFC 9112, 2.2). None = more data tell."""
    return None if data == b"\r" else 2 if data.startswith(b"\r\n") else 1 if data.startswith(b"\n") else 0


def headers_too_large(most: int) -> ApiError:
    """Return the error for a head of too many bytes."""
    return ApiError(431, f"The headers have over {most} bytes.", code="headers_too_large")


def check_head(head: bytes, most_bytes: int) -> None:
    """Check a head before it is parsed: its size, the number of its headers, and that it has one length at most."""
    if len(head) > most_bytes:
        raise headers_too_large(most_bytes)
    if head.count(b"\n") - 2 > MOST_HEADERS:
        raise ApiError(431, f"The request has over {MOST_HEADERS} headers.", code="headers_too_large")
    lengths = _LENGTH.findall(head)
    if len(lengths) > 1 or not all(each.strip().isdigit() for each in lengths):
        raise refusal("The request has more than one Content-Length, or one that is not a number.")


def check_request(request: h11.Request) -> h11.Request:
    """Check a parsed head; return it with a target that is a path, as routes expect it."""
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        raise refusal("Only HTTP/1.1 and HTTP/1.0 are supported.")
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise refusal("The length of the body is ambiguous: send either Content-Length or, in HTTP/1.1, chunks.")
    target = _path_of(request)
    if target == request.target:
        return request
    return h11.Request(method=request.method, headers=request.headers, target=target, http_version=request.http_version)


def _path_of(request: h11.Request) -> bytes:
    """Return a target without scheme and host, which clients send to proxies."""
    target = request.target
    if b"#" in target:
        raise refusal("The address has a fragment (#), which clients keep to themselves.")
    if target.startswith(b"/") or (request.method, target) == (b"OPTIONS", b"*"):
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        raise refusal("The address is neither a path nor a URL of http.")
    path = target[absolute.end() :]
    return path if path.startswith(b"/") else b"/" + path


class ChunkCount:
    """Refuses bodies in many tiny chunks, each of which takes as much time as a large one."""

    _FREE, _LEAST_BYTES = 256, 64  # chunks of any size; the least mean size of the others

    def __init__(self) -> None:
        self._chunks = self._bytes = 0

    def add(self, data: h11.Data) -> None:
        """Count a part of the body."""
        self._chunks += data.chunk_start
        self._bytes += len(data.data)
        if self._chunks > self._FREE + self._bytes // self._LEAST_BYTES:
            raise refusal(f"The body has many chunks of less than {self._LEAST_BYTES} bytes: send larger ones.")
