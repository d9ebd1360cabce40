"""Who sent a request: the owner of its share, limits and stored answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address, ip_network

from starlette.types import Scope

API_KEY = "speculant.api_key"  # in a scope: the key of the client
_NETWORK_BITS = 64  # of an IPv6 address: one client often has all addresses of such a network


def client_of(scope: Scope) -> str:
    """Return the name of a request's client: a digest of its API key, or its address on a server without keys."""
    key = scope.get(API_KEY)
    if key is not None:
        return f"key:{key_digest(key)}"
    return f"address:{network_of((scope.get('client') or ('',))[0])}"


def key_digest(key: str) -> str:
    """Return a name for an API key that does not reveal it."""
    return hashlib.sha256(key.encode("utf-8")).hexdigest()


def network_of(host: str) -> str:
    """Return the address that counts as one client: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> _NETWORK_BITS << _NETWORK_BITS))


def is_within(host: str, networks: Iterable[str]) -> bool:
    """Return whether an address is one of these addresses, or within one of these networks."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in ip_network(network) for network in networks)


def with_mapped(networks: Iterable[str]) -> list[str]:
    """Return these networks, and the IPv6 forms that IPv4 addresses have on a socket for both."""
    found = list(map(ip_network, networks))
    mapped = [f"::ffff:{each.network_address}/{96 + each.prefixlen}" for each in found if each.version == 4]
    return [*map(str, found), *mapped]
