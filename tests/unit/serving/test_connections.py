"""Who counts as one client; bounds on connections, turns, bodies and heads, with fakes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from contextlib import ExitStack
from typing import Any

import h11
import pytest
from starlette.types import Receive, Scope, Send

from speculant.errors import ConfigError
from speculant.serving import (
    API_KEY,
    MOST_HEADERS,
    USER,
    Acceptor,
    ApiError,
    BodyBytes,
    ChunkCount,
    Connections,
    NamedUsers,
    Rarely,
    RoundRobin,
    ServerOptions,
    bounded_connections,
    check_head,
    check_request,
    client_of,
    find_head,
    is_within,
    key_digest,
    network_of,
    with_mapped,
)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_an_address_counts_as_its_network(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_key_counts_before_the_address() -> None:
    near, far = ("192.0.2.7", 1), ("192.0.2.8", 1)
    assert client_of({"client": near, API_KEY: "a"}) == client_of({"client": far, API_KEY: "a"})
    assert client_of({"client": near, API_KEY: "a"}) != client_of({"client": near, API_KEY: "b"})
    assert client_of({"client": near}) != client_of({"client": far})
    assert "secret" not in client_of({"client": near, API_KEY: "secret"})


def test_a_user_counts_below_the_key() -> None:
    near, far = ("192.0.2.7", 1), ("192.0.2.8", 1)
    assert client_of({"client": near, USER: "a"}) == client_of({"client": far, USER: "a"})
    scopes = [{"client": near, API_KEY: key, USER: user} for key in (None, "a", "b") for user in (None, "a", "b")]
    assert len(set(map(client_of, scopes))) == len(scopes)


PROXY, DIRECT = ("10.0.0.7", 80), ("192.0.2.7", 1)


@pytest.mark.parametrize(
    ("sender", "names", "named"),
    [
        (PROXY, [b"anna"], "anna"),
        (("::ffff:10.0.0.7", 80), [b" anna "], "anna"),
        (PROXY, ["J\u00fcrgen".encode()], "J\u00c3\u00bcrgen"),
        (PROXY, [b"x" * 20_000], "x" * 20_000),
        (PROXY, [], None),
        (PROXY, [b" "], None),
        (PROXY, [b"anna", b"bert"], None),
        (DIRECT, [b"anna"], None),
        (None, [b"anna"], None),
    ],
    ids=["trusted", "mapped", "not ASCII", "long", "none", "empty", "two", "not trusted", "no address"],
)
def test_only_a_trusted_front_end_names_a_user(
    sender: tuple[str, int] | None, names: list[bytes], named: str | None
) -> None:
    """A user is known by a digest, whatever the length and the characters of the header."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    headers = [(b"x-user", name) for name in names]
    scope: Scope = {"type": "http", "client": sender, "headers": headers}
    users = NamedUsers(app, "X-User", ("10.0.0.0/8",))
    asyncio.run(users(scope, None, None))  # type: ignore[arg-type]  # it calls neither
    assert seen[0].get(USER) == (None if named is None else key_digest(named))


def test_a_request_without_an_address_has_a_client() -> None:
    assert client_of({}) == client_of({"client": None}) == "address:"


FAR, NEAR, OTHER = "192.0.2.1", "192.0.2.2", "192.0.2.3"


class FakeConnection:
    """A connection that notes its end."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True

    def check(self, now: float) -> None:
        self.checked = now


def added(connections: Connections, host: str, count: int = 1) -> list[FakeConnection]:
    made = [FakeConnection() for _ in range(count)]
    assert [connections.add(each, host) for each in made] == [True] * count
    return made


# --- places


def test_a_newcomer_gets_the_place_of_a_waiting_one() -> None:
    connections = Connections(4, 0)
    near, far = added(connections, NEAR), added(connections, FAR, 3)
    added(connections, OTHER, 2)
    assert [each.dropped for each in far] == [True, True, False]
    assert not near[0].dropped
    assert len(connections) == 4


def test_who_has_the_most_loses_even_its_own() -> None:
    connections = Connections(3, 0)
    near, far = added(connections, NEAR), added(connections, FAR, 8)
    assert [each.dropped for each in far] == [True] * 6 + [False] * 2
    assert not near[0].dropped


def test_a_request_in_flight_keeps_its_place() -> None:
    connections = Connections(2, 0)
    first, second = added(connections, FAR, 2)
    connections.work(first)
    added(connections, NEAR)
    assert (first.dropped, second.dropped) == (False, True)
    (third,) = added(connections, NEAR)
    connections.work(third)
    assert not connections.add(FakeConnection(), OTHER), "nobody waits"
    connections.wait(first)
    added(connections, OTHER)
    assert first.dropped


def busy(connections: Connections, host: str, count: int) -> list[FakeConnection]:
    """Add connections whose requests are being answered."""
    made = added(connections, host, count)
    for each in made:
        connections.work(each)
    return made


@pytest.mark.parametrize("crowd", [(8,), (4, 4), (3, 3, 2)], ids=str)
def test_requests_of_a_crowd_give_way_until_shares_are_equal(crowd: tuple[int, ...]) -> None:
    """The last one of the largest address ends. A newcomer's own requests, and those of its equals, do not."""
    connections = Connections(8, 0)
    held = [busy(connections, f"198.51.100.{place}", count) for place, count in enumerate(crowd)]
    share, new = 8 // (len(crowd) + 1), list[FakeConnection]()
    for _ in range(share):
        assert not connections.add(FakeConnection(), NEAR), "it takes more than a connection"
        new.append(FakeConnection())
        assert connections.claim(new[-1], NEAR)
        connections.work(new[-1])
    assert not connections.claim(FakeConnection(), NEAR), "nobody has two more"
    left = [[each.dropped for each in requests] for requests in held]
    assert all(states == sorted(states) for states in left), "the last ones end"
    assert {states.count(False) for states in left} <= {share, share + 1}
    assert not any(each.dropped for each in new)
    for host, requests in ((f"198.51.100.{place}", each) for place, each in enumerate(held)):
        assert not connections.claim(FakeConnection(), host), requests


def test_those_that_wait_give_way_before_requests() -> None:
    connections = Connections(4, 0)
    requests, (idle,) = busy(connections, FAR, 3), added(connections, NEAR)
    assert connections.claim(FakeConnection(), OTHER)
    assert idle.dropped
    assert not any(each.dropped for each in requests)


def test_who_has_more_can_t_displace_who_has_less() -> None:
    """Else a crowd whose requests run would end each connection of its neighbour before it has sent its request."""
    connections = Connections(4, 0)
    busy(connections, FAR, 3)
    (sending,) = added(connections, NEAR)
    assert not connections.claim(FakeConnection(), FAR)
    assert not sending.dropped


@pytest.mark.parametrize("proxy", [FAR, "2001:db8::7"])
def test_requests_of_a_trusted_proxy_are_kept(proxy: str) -> None:
    connections = Connections(4, 2, (proxy,))
    requests = busy(connections, proxy, 4)
    assert not connections.claim(FakeConnection(), NEAR)
    assert not any(each.dropped for each in requests)


def test_the_end_of_an_answer_begins_a_new_wait() -> None:
    connections = Connections(2, 0)
    first, second = added(connections, FAR, 2)
    connections.work(first)
    connections.wait(first)
    connections.wait(second)  # it waits already
    added(connections, FAR)
    assert (first.dropped, second.dropped) == (False, True)


def test_each_address_is_bounded() -> None:
    connections = Connections(100, 2, ("192.0.2.2", "198.51.100.0/24"))
    first, second = added(connections, FAR, 2)
    added(connections, FAR)
    assert (first.dropped, second.dropped) == (True, False)
    for host in (NEAR, "198.51.100.7", "::ffff:192.0.2.2"):
        assert not any(each.dropped for each in added(connections, host, 5)), "a proxy has many clients"
    network = [
        *added(connections, "2001:db8::1"),
        *added(connections, "2001:db8::2"),
        *added(connections, "2001:db8::3"),
    ]
    assert [each.dropped for each in network] == [True, False, False]


def test_an_address_whose_requests_all_run_is_refused() -> None:
    connections = Connections(100, 2)
    for each in added(connections, FAR, 2):
        connections.work(each)
    assert not connections.add(FakeConnection(), FAR)
    added(connections, NEAR)


def test_closed_connections_are_forgotten() -> None:
    connections = Connections(2, 2)
    for _ in range(5):
        first, second = added(connections, FAR, 2)
        connections.work(first)
        for each in (first, second, second, FakeConnection()):
            connections.remove(each)
    assert len(connections) == 0
    assert not connections.make_room()
    connections.wait(first)
    assert not connections.make_room(), "it is closed"


def test_open_connections_are_checked() -> None:
    connections = Connections(2, 0)
    first, second = added(connections, FAR, 2)
    connections.remove(second)
    connections.check(7.0)
    assert first.checked == 7.0
    assert not hasattr(second, "checked")


@pytest.mark.parametrize(("files", "most"), [(256, 192), (1024, 960), (64, 32), (10**6, 4096), (-1, 4096)])
def test_files_bound_connections(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    connections = bounded_connections(ServerOptions())
    added(connections, FAR, most // 2)
    before = len(connections)
    added(connections, FAR)
    assert len(connections) == before
    added(connections, NEAR, most // 2)
    added(connections, OTHER)
    assert len(connections) == most


def test_more_connections_than_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(ConfigError, match="ulimit -n 264"):
        bounded_connections(ServerOptions(max_connections=200))


@pytest.mark.parametrize(
    "given",
    [{"max_connections": 0}, {"max_connections_per_address": -1}, {"header_timeout": 0.0},
     {"max_buffered_bytes": 2**20}, {"trusted_proxies": ("*",)}, {"trusted_proxies": ("10.0.0.1/8",)},
     {"trusted_proxies": ("proxy.example",)}],
    ids=str,
)  # fmt: skip
def test_bounds_of_connections_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**given)


@pytest.mark.parametrize(
    ("host", "inside"),
    [("10.0.0.7", True), ("10.0.0.8", False), ("::ffff:10.0.0.7", True), ("10.1.2.3", True), ("x", False), ("", False)],
)
def test_proxies_are_known_by_their_networks(host: str, inside: bool) -> None:
    assert is_within(host, ["10.0.0.7", "10.1.0.0/16", "2001:db8::/32"]) is inside
    assert with_mapped(["10.1.0.0/16", "2001:db8::1"]) == ["10.1.0.0/16", "2001:db8::1/128", "::ffff:10.1.0.0/112"]


# --- turns, warnings, bodies


def test_clients_take_turns() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        turns = RoundRobin(asyncio.get_running_loop())
        for name in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
            turns.add(name[0], name, lambda name=name: order.append(name))
        await asyncio.sleep(0.01)
        return order

    assert asyncio.run(main()) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_the_loop_has_its_turns_too() -> None:
    """After each call; a dot is other work of the loop."""

    async def main() -> str:
        done: list[str] = []
        loop = asyncio.get_running_loop()
        turns = RoundRobin(loop)

        def call(name: str) -> None:
            done.append(name)
            loop.call_soon(done.append, ".")

        for name in ("a1", "b1", "a2"):
            turns.add(name[0], name, lambda name=name: call(name))
        await asyncio.sleep(0.01)
        return "".join(done)

    assert asyncio.run(main()) == "a1.b1.a2."


def test_an_owner_waits_once_and_may_leave() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        turns = RoundRobin(asyncio.get_running_loop())
        for name in ("a1", "a1", "a2", "b1"):
            turns.add(name[0], name, lambda name=name: order.append(name))
        for gone in ("a2", "b1", "b1", "c1"):
            turns.withdraw(gone[0], gone)
        assert [turns.has(name[0], name) for name in ("a1", "a2", "b1", "c1")] == [True, False, False, False]
        await asyncio.sleep(0.01)
        assert not turns.has("a", "a1")
        turns.add("b", "b1", lambda: order.append("last"))
        turns.withdraw("b", "b1")
        await asyncio.sleep(0.01)
        return order

    assert asyncio.run(main()) == ["a1"]


def test_a_turn_that_fails_ends_no_other() -> None:
    async def main() -> list[Any]:
        seen: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"])))
        turns = RoundRobin(loop)
        turns.add("a", 1, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        turns.add("a", 2, lambda: seen.append("next"))
        await asyncio.sleep(0.01)
        return seen

    assert asyncio.run(main()) == [ZeroDivisionError, "next"]


def test_a_warning_comes_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    rarely = Rarely(lambda: now)
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):  # noqa: B007 - the clock reads it
        rarely.warn("no %s", "room")
    assert [record.getMessage() for record in caplog.records] == ["no room", "no room (2 more since the last report)"]


def test_bodies_of_a_client_leave_room_for_others() -> None:
    bodies = BodyBytes(120)
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(bodies.holding(name)) for name in ("a", "a", "b"))
        one(40)
        two(20)
        with pytest.raises(ApiError) as caught:
            two(1)
        assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
        three(30)
        with pytest.raises(ApiError):
            three(1)
        with pytest.raises(ApiError):
            one(1)
    with bodies.holding("b") as again:
        again(60)


# --- accepting


class Failing(socket.socket):
    """A listening socket that has no files left for a while, or has another error."""

    fails, tries, number = True, 0, errno.EMFILE

    def accept(self) -> Any:
        self.tries += 1
        if self.fails:
            raise OSError(self.number, os.strerror(self.number))
        return super().accept()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM])
def test_errors_of_accepting_are_waited_out(caplog: pytest.LogCaptureFixture, number: int) -> None:
    caplog.set_level(logging.INFO)
    taken: list[str] = []

    class Taken(FakeConnection):
        def begin(self, accepted: socket.socket, _: Connections) -> None:
            taken.append(accepted.getpeername()[0])
            accepted.close()

    async def main() -> tuple[int, bool]:
        listening = Failing()
        listening.number = number
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        connections = Connections(10, 0)
        (waiting,) = added(connections, FAR)
        acceptor = Acceptor(listening, connections, Connections(1, 0), lambda _: Taken())  # type: ignore[arg-type, return-value]
        with socket.create_connection(listening.getsockname()):
            await asyncio.sleep(0.2)
            tries, listening.fails = listening.tries, False
            async with asyncio.timeout(10):
                while not taken:
                    await asyncio.sleep(0.01)
        acceptor.close()
        return tries, waiting.dropped

    tries, dropped = asyncio.run(main())
    assert 1 <= tries < 30
    assert dropped == (number == errno.EMFILE), "it is dropped if it may have been in the way"
    assert taken == ["127.0.0.1"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"can't accept connections, 1 are open: {os.strerror(number)}"
    ]


# --- heads


def head(*lines: str, first: str = "GET / HTTP/1.1") -> bytes:
    return "\r\n".join([first, "Host: x", *lines, "", ""]).encode()


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n", b"\n\r\n", b"\r\n\n"])
def test_a_head_ends_at_a_blank_line(end: bytes) -> None:
    assert find_head(b"GET /" + end + b"body\n\n") == b"GET /" + end
    assert find_head(b"GET /\r\nHost: x\r\n") is None


@pytest.mark.parametrize("size", [100, 101])
def test_every_byte_of_a_head_counts(size: int) -> None:
    data = head("a:" + " " * (size - len(head("a:"))))
    assert len(data) == size
    if size == 100:
        check_head(data, 100)
    else:
        with pytest.raises(ApiError, match="over 100 bytes"):
            check_head(data, 100)


def test_headers_are_counted() -> None:
    check_head(head(*["a:"] * (MOST_HEADERS - 1)), 10**6)
    with pytest.raises(ApiError, match="over 128 headers") as caught:
        check_head(head(*["a:"] * MOST_HEADERS), 10**6)
    assert caught.value.status == 431


@pytest.mark.parametrize(
    "values", [["5", "5"], ["5", "6"], ["5, 5"], ["+5"], ["-1"], ["0x5"], [""], ["5 5"], ["\u0665"]]
)
def test_a_doubtful_length_is_refused(values: list[str]) -> None:
    with pytest.raises(ApiError, match="Content-Length"):
        check_head(head(*(f"content-LENGTH:{value}" for value in values)), 10**6)


def test_one_length_is_accepted() -> None:
    check_head(head("Content-Length:  5 ", "X-Content-Length: a"), 10**6)


@pytest.mark.parametrize(
    ("target", "path"),
    [("/a?b=c", "/a?b=c"), ("http://other/a?b", "/a?b"), ("HTTPS://other:8/a", "/a"), ("http://other", "/"),
     ("http://other?a", "/?a"), ("http://a/http://b/", "/http://b/"), ("//a", "//a")],
)  # fmt: skip
def test_targets_become_paths(target: str, path: str) -> None:
    request = h11.Request(method="GET", target=target, headers=[("Host", "x"), ("A", "b")])
    checked = check_request(request)
    assert checked.target == path.encode()
    assert checked.headers == request.headers


@pytest.mark.parametrize("target", ["a", "*", "/a#b", "ftp://a/b", "http:///a", "host:80", "?a"])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_request(h11.Request(method="GET", target=target, headers=[("Host", "x")]))
    assert caught.value.status == 400


def test_small_chunks_are_few() -> None:
    few = ChunkCount()
    for _ in range(256):
        few.add(h11.Data(data=b"x", chunk_start=True))
    for _ in range(10_000):
        few.add(h11.Data(data=b"x" * 32, chunk_start=True))
        few.add(h11.Data(data=b"x" * 32, chunk_end=True))
    many = ChunkCount()
    for _ in range(260):  # with 256 bytes, four more may come
        many.add(h11.Data(data=b"x", chunk_start=True))
    with pytest.raises(ApiError, match="larger"):
        many.add(h11.Data(data=b"x", chunk_start=True))
