"""Strangers' connections: malformed requests, clients that send or read slowly, and more connections than places."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from speculant import AsyncEngine
from speculant.serving import EventStream, client_of, key_digest, while_connected
from tests.async_engines import core
from tests.attackers import ATTACKS, attacked
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import encoded, exchange, opened
from tests.servers import LiveServer, ServerProcess, never_loads, serve, serve_process

__all__ = ["checkpoints", "never_loads", "serve", "serve_process"]

HOST = b"Host: localhost\r\n"
VERSION = b"GET /version HTTP/1.1\r\n" + HOST
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
SMUGGLED = b"5\r\nabcde\r\n0\r\n\r\nGET /version HTTP/1.1\r\n" + HOST + b"\r\n"

MALFORMED: dict[str, tuple[int, bytes]] = {
    "length and chunks": (400, POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED),
    "chunks and length": (400, POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED),
    "two lengths": (400, POST + b"Content-Length: 32\r\nContent-Length: 32\r\n\r\n" + BODY),
    "different lengths": (400, POST + b"Content-Length: 32\r\nContent-Length: 2\r\n\r\n" + BODY),
    "a list of lengths": (400, POST + b"Content-Length: 32, 32\r\n\r\n" + BODY),
    "no number": (400, POST + b"Content-Length: +32\r\n\r\n" + BODY),
    "gzip": (400, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED),
    "identity": (400, POST + b"Transfer-Encoding: identity\r\n\r\n" + SMUGGLED),
    "twice chunked": (400, POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED),
    "chunks in 1.0": (400, POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + SMUGGLED),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)),
    "no host": (400, b"GET /version HTTP/1.1\r\n\r\n"),
    "two hosts": (400, VERSION + HOST + b"\r\n"),
    "fragment": (400, b"GET /version#a HTTP/1.1\r\n" + HOST + b"\r\n"),
    "no path": (400, b"GET version HTTP/1.1\r\n" + HOST + b"\r\n"),
    "tunnel": (400, b"CONNECT other:443 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "another scheme": (400, b"GET ftp://x/version HTTP/1.1\r\n" + HOST + b"\r\n"),
    "NUL": (400, VERSION + b"A: \0\r\n\r\n"),
    "no colon": (400, VERSION + b"A\r\n\r\n"),
    "blank before colon": (400, VERSION + b"Content-Length : 0\r\n\r\n"),
    "not ASCII": (400, "GET /é HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()),
    "two blank lines": (400, b"\r\n\r\n" + VERSION + b"\r\n"),
    "a carriage return": (400, b"\r" + VERSION + b"\r\n"),
    "many headers": (431, VERSION + b"a:\n" * 2000 + b"\r\n"),
    "blanks": (431, VERSION + b"A:" + b" " * 40_000 + b"b\r\n\r\n"),
    "folded blanks": (431, VERSION + b"A: b\r\n" + b" \r\n" * 12_000 + b"\r\n"),
    "long address": (431, b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "long method": (431, b"x" * 200_000),
    "bad chunk": (400, CHUNKED + b"x\r\n"),
    "bad chunk, not asked for": (400, CHUNKED[:-2] + b"Expect: 100-continue\r\n\r\nx\r\n"),
    "chunk without end": (400, CHUNKED + b"1\r\nab"),
    "long extension": (431, CHUNKED + b"1;" + b"x" * 200_000 + b"\r\na"),
    "tiny chunks": (400, CHUNKED + b"1\r\n \r\n" * 10_000),
    "long trailers": (431, CHUNKED + b"1\r\n \r\n0\r\n" + b"a:\n" * 50_000),
}
CLOSE = b"Connection: close\r\n\r\n"
JSON = {"Content-Type": "application/json"}
SERVED: dict[str, tuple[int, bytes]] = {
    "plain": (200, VERSION + CLOSE),
    "absolute": (200, b"GET http://other.example:80/version HTTP/1.1\r\n" + HOST + CLOSE),
    "absolute with query": (200, b"GET HTTPS://other.example/version?a=b HTTP/1.1\r\n" + HOST + CLOSE),
    "absolute root": (200, b"GET http://other.example HTTP/1.1\r\n" + HOST + CLOSE),
    "two schemes": (404, b"GET http://a/http://b/version HTTP/1.1\r\n" + HOST + CLOSE),
    "asterisk": (404, b"OPTIONS * HTTP/1.1\r\n" + HOST + CLOSE),
    "WebSocket": (200, VERSION + b"Upgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n"),
    "h2c": (200, VERSION + b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n" + CLOSE),
    "tunnel to a path": (405, b"CONNECT /version HTTP/1.1\r\n" + HOST + CLOSE),
    "encoded NUL": (404, b"GET /v1/models/%00 HTTP/1.1\r\n" + HOST + CLOSE),
    "blank line": (200, b"\r\n" + VERSION + CLOSE),
    "blank line feed": (200, b"\n" + VERSION + CLOSE),
    "line feeds": (200, VERSION.replace(b"\r", b"") + b"Connection: close\n\n"),
    "many headers": (200, VERSION + b"a:\r\n" * 100 + CLOSE),
    "chunks": (200, CHUNKED.replace(b"\r\n\r\n", b"\r\n" + CLOSE) + b"8\r\n" + BODY[:8] + b"\r\n18;a=b\r\n" + BODY[8:]
               + b"\r\n0\r\nA: b\r\n\r\n"),
}  # fmt: skip


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """See that a test logs nothing: strangers could fill the log."""
    caplog.set_level(logging.WARNING)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused_and_closed(demo: LiveServer, name: str) -> None:
    """There is one answer, then the connection ends. Data after a malformed request are not read as a request."""
    status, request = MALFORMED[name]
    reply = asyncio.run(exchange(demo.url, request))
    assert reply.status == status, reply
    assert b"connection: close" in reply.headers.lower()
    assert reply.value["error"]["message"]
    assert demo.http.get("/version").status_code == 200


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", SERVED)
def test_unusual_requests_are_answered(demo: LiveServer, name: str) -> None:
    status, request = SERVED[name]
    reply = asyncio.run(exchange(demo.url, request))
    assert reply.status == status, reply
    if b"/version" in request and status == 200:
        assert b'"version"' in reply.body


@pytest.mark.usefixtures("quiet")
def test_a_blank_line_before_each_request_is_ignored(demo: LiveServer) -> None:
    """Some clients send one after a body. It may arrive in two parts."""
    post = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with opened(demo.url) as connection:
        for part in (b"\r", b"\n" + post + b"\r", b"\n" + VERSION + b"\r\n", b"\r\n" + VERSION + CLOSE):
            connection.sendall(part)
            time.sleep(0.05)
        assert read_to_end(connection).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.usefixtures("quiet")
def test_a_malformed_second_request_is_refused(demo: LiveServer) -> None:
    reply = asyncio.run(exchange(demo.url, VERSION + b"\r\n" + VERSION + b"\r\n" + MALFORMED["bad chunk"][1]))
    assert reply.body.count(b"HTTP/1.1 200 ") == 1
    assert reply.body.count(b"HTTP/1.1 400 ") == 1
    assert reply.status == 200


@pytest.mark.usefixtures("quiet")
def test_a_refused_body_may_become_malformed(demo: LiveServer) -> None:
    """The answer has begun before the malformed part arrives."""
    request = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n") + b"1\r\na\r\n"
    with opened(demo.url) as connection:
        connection.sendall(request)
        assert b" 415 " in read_until(connection, b"}}")
        connection.sendall(b"x\r\n")
        assert b"HTTP/1.1" not in read_to_end(connection)
    assert demo.http.get("/version").status_code == 200


@pytest.mark.usefixtures("quiet")
def test_a_malformed_body_after_its_answer_ends_it(serve: Any, never_loads: Any) -> None:
    """A second answer would be that of the next request."""
    server = serve(never_loads, allowed_origins=("https://a.example",))
    asks = CHUNKED.replace(b"POST", b"OPTIONS")[:-2] + b"Origin: https://a.example\r\n"
    with opened(server.url) as connection:
        connection.sendall(asks + b"Access-Control-Request-Method: GET\r\n\r\n")
        assert b" 200 " in read_until(connection, b"OK")
        connection.sendall(b"x\r\n")
        assert read_to_end(connection) == b""


def test_one_key_is_sent_in_one_header(serve: Any, checkpoints: Checkpoints) -> None:
    server = serve(AsyncEngine(checkpoints.target), api_keys=("one", "two")).ready()
    for keys, status in ((["one"], 200), (["one", "one"], 401), (["one", "two"], 401), (["one", "x"], 401)):
        headers = [("Authorization", f"Bearer {key}") for key in keys]
        assert server.http.get("/v1/models", headers=headers).status_code == status


# --- deadlines


def drip(connection: socket.socket, data: bytes) -> None:
    """Send a byte at a time, fifty in a second."""
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what arrives, up to these bytes."""
    read = b""
    while not read.endswith(end):
        piece = connection.recv(4096)
        assert piece, read
        read += piece
    return read


def read_to_end(connection: socket.socket) -> bytes:
    pieces = []
    with suppress(ConnectionError):
        while piece := connection.recv(65_536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture
def hasty(serve: Any, never_loads: Callable[[], AsyncEngine]) -> LiveServer:
    """Return a server with short deadlines."""
    server: LiveServer = serve(never_loads, header_timeout=0.3, send_timeout=0.3)
    return server


def test_a_silent_connection_ends(hasty: LiveServer) -> None:
    with opened(hasty.url) as connection:
        assert read_to_end(connection) == b""


@pytest.mark.parametrize("before", [b"", VERSION + b"\r\n"], ids=["first", "second"])
def test_a_slow_head_is_refused(hasty: LiveServer, before: bytes) -> None:
    """Though bytes keep coming."""
    with opened(hasty.url) as connection:
        if before:
            connection.sendall(before)
            read_until(connection, b"}")
        connection.settimeout(0.02)
        for byte in VERSION + b"A: " + b"x" * 10_000:
            connection.sendall(bytes([byte]))
            with suppress(TimeoutError):
                answer = connection.recv(4096)
                break
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "timeout"


def test_a_connection_is_kept_for_the_next_request(hasty: LiveServer) -> None:
    with opened(hasty.url) as connection:
        for _ in range(5):
            time.sleep(0.15)
            connection.sendall(VERSION + b"\r\n")
            assert b'"version"' in read_until(connection, b"}")
        assert read_to_end(connection) == b""


def test_a_body_after_its_answer_has_an_end(serve: Any, never_loads: Any) -> None:
    """A CORS preflight is answered before its body arrives."""
    server = serve(never_loads, allowed_origins=("https://a.example",), header_timeout=0.3)
    asks = (
        b"OPTIONS /version HTTP/1.1\r\n" + HOST + b"Origin: https://a.example\r\nAccess-Control-Request-Method: GET\r\n"
    )
    with opened(server.url) as connection:
        connection.sendall(asks + b"Content-Length: 1000000\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        with pytest.raises(ConnectionError):
            drip(connection, b"x" * 500)


@pytest.mark.covering(1)
@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"], ids=["kept", "closing"])
@pytest.mark.parametrize("before", [0, 1], ids=["over", "next"])
def test_an_answer_that_is_not_read_is_dropped(hasty: LiveServer, before: int, close: bytes) -> None:
    """Nothing can be sent to the client, be it that the answer is over, or that the next one can't begin."""
    hasty.app.add_api_route("/large", lambda: Response(bytes(2**24)))
    request, connections = b"GET /large HTTP/1.1\r\n" + HOST, hasty.server.server_state.connections
    with opened(hasty.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall((request + b"\r\n") * before + request + close + b"\r\n")
        hasty.until(
            lambda: any(each.transport and each.transport.get_write_buffer_size() for each in tuple(connections))
        )
        hasty.until(lambda: not connections)


def test_who_leaves_before_its_next_request_is_noticed(hasty: LiveServer) -> None:
    """The next request stays unread while the first one is answered, and so does the connection's end."""
    begun, left = threading.Event(), threading.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            left.set()

    async def wait(request: Request) -> Response:
        await request.body()
        return await while_connected(request.receive, forever())

    hasty.app.add_api_route("/wait", wait)
    with opened(hasty.url) as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        assert begun.wait(20)
        connection.sendall(VERSION + b"\r\n")
        hasty.until(lambda: any(each.flow.read_paused for each in tuple(hasty.server.server_state.connections)))
        assert not left.wait(1.2), "it is still there"
    assert left.wait(5)


# --- places


def gets_version(server: Any, source: str = "127.0.0.1") -> bool:
    with opened(server.url, source) as connection:
        connection.sendall(VERSION + CLOSE)
        return b'"version"' in read_to_end(connection)


def test_a_newcomer_gets_in_when_all_places_are_taken(serve: Any, never_loads: Any) -> None:
    server = serve(never_loads, max_connections=6, max_connections_per_address=0)
    server.http.close()
    with ExitStack() as stack:
        crowd = [stack.enter_context(opened(server.url, "127.0.0.2")) for _ in range(12)]
        assert gets_version(server, "127.0.0.3")
        assert read_to_end(crowd[0]) == b""
        crowd[-1].sendall(VERSION + CLOSE)
        assert b'"version"' in read_to_end(crowd[-1])


def test_an_address_has_its_share_of_places(serve: Any, never_loads: Any) -> None:
    server = serve(never_loads, max_connections_per_address=2)
    with opened(server.url, "127.0.0.2") as first, opened(server.url, "127.0.0.2") as second:
        assert gets_version(server, "127.0.0.2")
        assert read_to_end(first) == b""
        second.sendall(VERSION + CLOSE)
        assert b'"version"' in read_to_end(second)


def test_a_request_in_flight_keeps_its_connection(
    serve: Any, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of a request whose body has not come yet is not kept: it may never come."""
    engine, goes_on = AsyncEngine(checkpoints.target), threading.Event()
    server, step = serve(engine, max_connections_per_address=1).ready(), core(engine).step
    monkeypatch.setattr(core(engine), "step", lambda: (goes_on.wait(20), step())[1])
    head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    with opened(server.url, "127.0.0.2") as first, opened(server.url, "127.0.0.2") as second:
        assert read_to_end(first) == b""
        second.sendall(head)
        server.until(lambda: any(each._answering for each in tuple(server.server.server_state.connections)))
        assert gets_version(server, "127.0.0.2")
        assert b"connection_taken" in read_to_end(second)
    with opened(server.url, "127.0.0.2") as busy:
        busy.sendall(head + BODY)
        server.until(lambda: server.state.admission.count == 1)
        with opened(server.url, "127.0.0.2") as refused:
            refused.sendall(VERSION + b"\r\n")
            assert read_to_end(refused).startswith(b"HTTP/1.1 503 ")
        goes_on.set()
        assert b" 200 " in read_to_end(busy)


@pytest.fixture
def waits(serve: Any, checkpoints: Checkpoints) -> Iterator[LiveServer]:
    """Return a server of twelve places, six for an address. `/wait` and `/events` answer at the end of the test."""
    engine = AsyncEngine(checkpoints.target)
    server: LiveServer = serve(engine, max_connections=12, max_connections_per_address=6).ready()
    over = threading.Event()
    server.cancelled, server.running = [], []  # type: ignore[attr-defined]

    async def until_over() -> str:
        server.running.append(1)  # type: ignore[attr-defined]
        try:
            while not over.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            server.cancelled.append(server.running.pop())  # type: ignore[attr-defined]
            raise
        return "over"

    async def wait(request: Request) -> Response:
        await request.body()
        return Response(await while_connected(request.receive, until_over()))

    async def events(request: Request) -> Response:
        await request.body()

        async def made() -> Any:
            yield b"data: 1\n\n"
            yield await until_over()

        return EventStream(made(), None)

    server.app.add_api_route("/wait", wait)
    server.app.add_api_route("/events", events)
    server.app.add_api_route("/ok", lambda: Response("ok"))
    server.http.close()
    yield server
    over.set()


def asked(server: Any, path: str, source: str, more: bytes = b"") -> bytes:
    """Return the whole answer to a request from an address."""
    with opened(server.url, source) as connection:
        connection.sendall(b"GET %s HTTP/1.1\r\n" % path.encode() + HOST + more + b"\r\n")
        return read_to_end(connection)


def crowd_of(server: Any, stack: ExitStack, sources: list[str], count: int, path: str = "/wait") -> list[socket.socket]:
    """Begin requests that go on, as many from each address as it may have, and some more."""
    crowd = []
    for source in sources * count:
        crowd.append(stack.enter_context(opened(server.url, source)))
        crowd[-1].sendall(b"GET %s HTTP/1.1\r\n" % path.encode() + HOST + b"\r\n")
        server.until(lambda: len(server.running) == min(len(crowd), 12))
    return crowd


@pytest.mark.parametrize("addresses", [2, 3])
def test_addresses_that_take_all_places_lock_nobody_out(waits: LiveServer, addresses: int) -> None:
    """Though all their requests run: probes are answered beyond the places, and a newcomer gets its share of them."""
    sources = [f"127.0.0.{2 + place}" for place in range(addresses)]
    with ExitStack() as stack:
        crowd_of(waits, stack, sources, 16 // addresses)
        before = list(waits.cancelled)  # type: ignore[attr-defined]
        probes = [asked(waits, path, "127.0.0.9") for path in ("/health", "/ping?a=b") for _ in range(20)]
        assert [each.split()[1] for each in probes] == [b"200"] * 40
        assert all(b"connection: close" in each.lower() for each in probes)
        assert waits.cancelled == before, "a probe takes nobody's place"  # type: ignore[attr-defined]
        started = time.monotonic()
        for _ in range(10):
            assert asked(waits, "/ok", "127.0.0.9", CLOSE[:-2]).endswith(b"ok")
        assert time.monotonic() - started < 5
        waits.until(lambda: len(waits.cancelled) > len(before))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("path", "status"), [("/wait", b"503"), ("/events", b"200")])
def test_a_request_that_gives_way_ends_with_an_error(waits: LiveServer, path: str, status: bytes) -> None:
    with ExitStack() as stack:
        crowd = crowd_of(waits, stack, ["127.0.0.2", "127.0.0.3"], 6, path)
        assert asked(waits, "/ok", "127.0.0.9", CLOSE[:-2]).endswith(b"ok")
        answer = read_to_end(crowd[-2])  # the last one of the first address
        assert answer.split()[1] == status
        assert b'"code":"connection_taken"' in answer
        assert path != "/events" or answer.endswith(b"\n\n\r\n0\r\n\r\n"), "it is the last event"
        waits.until(lambda: waits.cancelled == [1])  # type: ignore[attr-defined]


def test_silent_connections_do_not_keep_probes_out(waits: LiveServer) -> None:
    with ExitStack() as stack:
        crowd_of(waits, stack, ["127.0.0.2", "127.0.0.3"], 6)
        for _ in range(40):
            stack.enter_context(opened(waits.url, "127.0.0.2"))
        assert [asked(waits, "/health", "127.0.0.9").split()[1] for _ in range(20)] == [b"200"] * 20
        assert asked(waits, "/health", "127.0.0.2").split()[1] == b"200"
        assert asked(waits, "/ok", "127.0.0.2").split()[1] == b"503"


@pytest.mark.parametrize("trusted", [(), ("127.0.0.2",), ("127.0.0.0/8",)], ids=str)
def test_only_a_trusted_proxy_names_the_client(serve: Any, never_loads: Any, trusted: tuple[str, ...]) -> None:
    server: LiveServer = serve(never_loads, trusted_proxies=trusted, max_connections_per_address=3)

    async def who(request: Request) -> str:
        return client_of(request.scope)

    server.app.add_api_route("/who", who)
    request = b"GET /who HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 192.0.2.9, 192.0.2.7\r\n" + CLOSE
    with ExitStack() as stack:
        crowd = [stack.enter_context(opened(server.url, "127.0.0.2")) for _ in range(6)]
        crowd[-1].sendall(request)
        named = b"address:192.0.2.7" if trusted else b"address:127.0.0.2"
        assert named in read_to_end(crowd[-1])
        if trusted:  # it has as many connections as it needs
            crowd[0].sendall(request)
            assert named in read_to_end(crowd[0])
        else:
            assert read_to_end(crowd[0]) == b""


@pytest.mark.parametrize("forwarded", [b"", b"X-Forwarded-For: 192.0.2.9\r\n"], ids=["", "forwarded"])
def test_only_a_trusted_proxy_names_users(serve: Any, never_loads: Any, forwarded: bytes) -> None:
    """The address that a proxy forwards is not the one that is trusted."""
    server: LiveServer = serve(never_loads, trusted_proxies=("127.0.0.2",), client_header="X-User")

    async def who(request: Request) -> str:
        return client_of(request.scope)

    server.app.add_api_route("/who", who)

    def asked(address: str, *names: bytes) -> bytes:
        with opened(server.url, address) as connection:
            named = b"".join(b"X-User: %s\r\n" % name for name in names)
            connection.sendall(b"GET /who HTTP/1.1\r\n" + HOST + forwarded + named + CLOSE)
            return read_to_end(connection).rpartition(b"\r\n\r\n")[2].strip(b'"')

    assert [asked("127.0.0.2", name) for name in (b"one", b"two")] == [
        f"user:{key_digest(name)}".encode() for name in ("one", "two")
    ]
    assert asked("127.0.0.2") == (b"address:192.0.2.9" if forwarded else b"address:127.0.0.2")
    assert {asked("127.0.0.3", name) for name in (b"one", b"two")} == {b"address:127.0.0.3"}


def test_a_client_that_has_reset_its_connection_is_known(serve: Any, never_loads: Any) -> None:
    """Its request counts among those of its address, although the system does not tell the address any more."""
    server: LiveServer = serve(never_loads)
    clients: list[str] = []

    async def who(request: Request) -> str:
        clients.append(client_of(request.scope))
        return "known"

    server.app.add_api_route("/who", who)
    arrived = threading.Event()
    server.in_loop(lambda: arrived.wait(20))  # connections wait to be accepted meanwhile
    with opened(server.url, "127.0.0.2") as hasty:
        hasty.sendall(b"GET /who HTTP/1.1\r\n" + HOST + CLOSE)
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    arrived.set()
    assert gets_version(server, "127.0.0.3")
    server.until(lambda: bool(clients))
    assert clients == ["address:127.0.0.2"]


# --- bodies


def test_one_client_can_t_take_the_room_for_bodies(serve: Any, checkpoints: Checkpoints) -> None:
    server = serve(AsyncEngine(checkpoints.target), max_body_bytes=1000, max_buffered_bytes=4000).ready()
    with ExitStack() as stack:
        crowd = [stack.enter_context(opened(server.url, "127.0.0.2")) for _ in range(4)]
        for each in crowd:
            each.sendall(POST + b"Content-Length: 1000\r\n\r\n" + b" " * 900)
        server.until(lambda: bool(select.select(crowd, [], [], 0)[0]))
        answer = select.select(crowd, [], [], 0)[0][0].recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert server.http.post("/v1/completions", content=b" " * 900, headers=JSON).status_code == 400


# --- attacks


def times_of(url: str, count: int) -> list[float]:
    """Return the seconds of short answers, one after another, each on a connection of its own."""
    request = encoded("/v1/completions", {"prompt": "a", "max_tokens": 8, "ignore_eos": True})
    found = []
    for _ in range(count):
        reply = asyncio.run(exchange(url, request))
        assert reply.status == 200, reply
        found.append(reply.seconds)
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_neighbour_of_attackers_hardly_waits(serve_process: Any, attack: str) -> None:
    """Attackers with 300 connections from another address, on a server that may open 256 files."""
    server: ServerProcess = serve_process("demo", files=256).ready()
    alone = times_of(server.url, 20)
    memory = server.memory
    with attacked(attack, server.url, "127.0.0.2", 300):
        time.sleep(3)
        beside = times_of(server.url, 50)
    print(
        f"{attack}: alone {max(alone):.3f} s, beside {max(beside):.3f} s (median"
        f" {statistics.median(beside):.3f} s), memory {(server.memory - memory) >> 20} MiB more,"
        f" {sum(map(len, server.messages))} bytes logged"
    )
    assert max(beside) < max(alone) + 0.25
    assert len(server.messages) < 10, server.messages
    assert server.memory - memory < 128 * 2**20


@pytest.mark.slow
def test_addresses_with_requests_without_end_lock_nobody_out(serve_process: Any) -> None:
    """Two addresses ask on 220 connections for long answers, on a server with 192 places."""
    server: ServerProcess = serve_process("demo", files=256).ready()
    server.http.close()
    with attacked("endless", server.url, "127.0.0.2", 110), attacked("endless", server.url, "127.0.0.3", 110):
        time.sleep(5)
        probes = [asyncio.run(exchange(server.url, encoded("/health"))).status for _ in range(40)]
        beside = times_of(server.url, 20)
    print(f"beside two addresses without end: {max(beside):.3f} s; /health: {probes}")
    assert probes == [200] * 40
    assert max(beside) < 5


@pytest.mark.slow
def test_silent_sockets_of_the_same_address_give_way(serve_process: Any) -> None:
    server: ServerProcess = serve_process("demo", files=256).ready()
    alone = times_of(server.url, 20)
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(opened(server.url))
        beside = times_of(server.url, 50)
    print(f"300 silent sockets: alone {max(alone):.3f} s, beside {max(beside):.3f} s")
    assert max(beside) < max(alone) + 0.25


@pytest.mark.slow
def test_too_few_files_are_waited_out(serve_process: Any) -> None:
    """The process may open fewer files than it could when the server counted its places."""
    server: ServerProcess = serve_process("demo", files=1000).ready()
    server.http.close()
    few = len(os.listdir(f"/proc/{server.process.pid}/fd")) + 20
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (few, 1000))
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(opened(server.url, "127.0.0.2"))
        beside = times_of(server.url, 50)
    said = [message for message in server.messages if "can't accept connections" in message]
    print(f"at {few} files beside 300 silent sockets: {max(beside):.3f} s; {said}")
    assert max(beside) < 5
    assert 1 <= len(said) <= 2, server.messages


@pytest.mark.slow
def test_a_request_behind_a_stream_is_not_kept(serve_process: Any) -> None:
    """A client may send as much as it likes while an answer is streamed: the server reads little of it."""
    server: ServerProcess = serve_process("demo").ready()
    body = b'{"prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    with opened(server.url) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.recv(1000)
        memory = server.memory
        connection.settimeout(2)
        with suppress(TimeoutError, ConnectionError):
            connection.sendall((VERSION + b"\r\n") * 10**6)
        print(f"memory {(server.memory - memory) >> 20} MiB more")
        assert server.memory - memory < 32 * 2**20
