"""The client that sent a request. Shares, limits and stored responses belong to clients."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path

from starlette.types import Scope

from speculant.errors import ConfigError
from speculant.types import WEIGHTS

logger = logging.getLogger(__name__)

API_KEY = "speculant.api_key"  # in a scope: the key of the client
USER = "speculant.user"  # in a scope: a digest of the name that a trusted front end gave the user
_NETWORK_BITS = 64  # of an IPv6 address: one client often has all addresses of such a network


_FORM = 'write a JSON object, {"KEY": 2.0, ...}, with the weights of API keys.'


def read_weights(path: str | None, api_keys: Sequence[str]) -> dict[str, float]:
    """Return the weights of clients by name, from a file that has them by API key; a key that it leaves out has 1.

    Raises ConfigError for a file that can't be read, or that is not such an object. No message has a key of the file.
    """
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        if Path(path).stat().st_mode & 0o077:
            logger.warning("%s has API keys and other users may read or write it", path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the weights in {path} can't be read: {reason}", "name a file that you may read.") from None
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid JSON", _FORM) from None
    if not isinstance(pairs, tuple):
        raise ConfigError(f"{path} holds no JSON object", _FORM)
    for place, (key, weight) in enumerate(pairs, 1):
        _check_weight(f"key {place} of {path}", key in api_keys, weight)
    weights = {f"key:{key_digest(key)}": float(weight) for key, weight in pairs}
    if len(weights) < len(pairs):
        raise ConfigError(f"{path} has a key twice", "leave one of them out.")
    return weights


def _check_weight(name: str, known: bool, weight: object) -> None:
    """Raise ConfigError for an unknown key, or a value that is not a weight."""
    if not known:
        raise ConfigError(f"{name} is not a key of this server", "name it with --api-key too, or leave it out.")
    low, high = WEIGHTS
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not low <= weight <= high:
        raise ConfigError(f"the weight of {name} is not a number from {low} to {high}", _FORM)


def client_of(scope: Scope) -> str:
    """Return the name of a request's client: digests of its API key and its user, or its address if it has neither."""
    key, user = scope.get(API_KEY), scope.get(USER)
    parts = [] if key is None else [f"key:{key_digest(key)}"]
    parts += [] if user is None else [f"user:{user}"]
    return "/".join(parts) or f"address:{network_of((scope.get('client') or ('',))[0])}"


def salt_of(scope: Scope, own: str | None) -> str:
    """Return the salt of a request's prefix cache. Different keys or users share nothing, nor do different salts."""
    key, user = scope.get(API_KEY), scope.get(USER)
    who = ("" if key is None else key_digest(key)) + ("" if user is None else f"/{user}")
    return f"{who}:{own or ''}" if who or own else ""


def key_digest(key: str) -> str:
    """Return a name for an API key, or for a user, that does not reveal it."""
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
