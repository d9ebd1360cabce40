"""Who counts as one client."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from speculant.serving.http.clients import API_KEY, USER, client_of, key_digest, network_of
from speculant.serving.http.limits import NamedUsers


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
