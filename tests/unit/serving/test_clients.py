"""Who counts as one client."""

from __future__ import annotations

import pytest

from speculant.serving.clients import API_KEY, client_of, network_of


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


def test_a_request_without_an_address_has_a_client() -> None:
    assert client_of({}) == client_of({"client": None}) == "address:"
