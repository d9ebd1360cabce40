"""Who counts as one client, and what clients share: places for connections, and turns.

Shares, limits and stored responses belong to clients.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, Protocol

from starlette.types import Scope

from speculant.errors import ConfigError
from speculant.serving.options import ServerOptions
from speculant.serving.wire import ApiError, unavailable
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


_MOST = 4096  # connections by default, if the process may open more files
_RESERVE = 64  # file descriptors that are left to the engine, to provisional places, and to connections that close
PROVISIONAL = 16  # places in addition to a server's: each until the head of its connection's request
_MINUTE = 60.0


class OpenConnection(Protocol):
    """A connection to a client."""

    def drop(self) -> None:
        """Close the connection at once. A request that is being answered ends with an error."""

    def check(self, now: float) -> None:
        """Close the connection if its client is late. now: the loop's time in seconds."""


@dataclass(slots=True)
class _Held:
    """The connections of one address: waiting ones, in the order of their waits, and ones that are answered."""

    is_bounded: bool
    waiting: dict[OpenConnection, None] = field(default_factory=dict)
    working: dict[OpenConnection, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.working)


class Connections:
    """All open connections. Addresses share the places as clients share the engine's.

    A connection waits from its beginning, and from the end of each answer, until its next request is complete. For use
    in one event loop.
    """

    def __init__(self, most: int, most_per_address: int, unbounded: tuple[str, ...] = ()) -> None:
        """most_per_address: 0 = no bound. unbounded: addresses and networks of proxies, which have no bound either."""
        self._most, self._most_per_address, self._unbounded = most, most_per_address, unbounded
        self._addresses: dict[OpenConnection, str] = {}
        self._held: dict[str, _Held] = {}  # by address
        self._rarely = Rarely()

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: OpenConnection, host: str) -> bool:
        """Take a connection in. False = there is no place for it.

        If its address has as many as it may have, the oldest waiting connection of this address is dropped. If all
        places are taken, addresses with more connections than the newcomer's, and the newcomer's own, are compared: the
        address with the most waiting connections loses its oldest waiting one.
        """
        address = network_of(host)
        own, is_bounded = len(self._held.get(address, ())), not is_within(host, self._unbounded)
        if own >= self._most_per_address > 0 and is_bounded:
            placed = self._drop_waiting([address])
        else:
            placed = len(self) < self._most or self._drop_waiting(self._larger(own, address))
        if placed:
            self._addresses[connection] = address
            self._held.setdefault(address, _Held(is_bounded)).waiting[connection] = None
        return placed

    def claim(self, connection: OpenConnection, host: str) -> bool:
        """Take in a connection whose request's head has arrived. False = there is no place for it.

        If no connection that waits gives way, the address with the most places loses its last request, if it has at
        least two places more than the newcomer's address. Proxies without a bound keep their requests.
        """
        if self.add(connection, host):
            return True
        address = network_of(host)
        own = len(self._held.get(address, ()))
        return self._drop_request(self._larger(own + 1)) and self.add(connection, host)

    def refusal(self, host: str) -> ApiError:
        """Return the error for a connection from an address that gets no place, and log it."""
        self._rarely.warn("refused a connection from %s: %s are open", host, len(self))
        return unavailable("The server has too many connections. Try again later.", "too_many_connections")

    def remove(self, connection: OpenConnection) -> None:
        """Forget a connection that is closed, if it is known."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            held = self._held[address]
            held.waiting.pop(connection, None)
            held.working.pop(connection, None)
            if not held:
                del self._held[address]

    def wait(self, connection: OpenConnection) -> None:
        """Note that a connection waits for its client's request; one that waits already keeps its turn."""
        if (held := self._held_with(connection)) is not None:
            held.working.pop(connection, None)
            held.waiting.setdefault(connection)

    def work(self, connection: OpenConnection) -> None:
        """Note that a request is being answered, so that its connection keeps its place while others wait."""
        if (held := self._held_with(connection)) is not None:
            held.waiting.pop(connection, None)
            held.working.setdefault(connection)

    def make_room(self) -> bool:
        """Drop the oldest waiting connection of the address with the most of them. False = none waits."""
        return self._drop_waiting(self._held)

    def check(self, now: float) -> None:
        """Close the connections whose clients are late. now: the loop's time in seconds."""
        for connection in tuple(self._addresses):
            connection.check(now)

    def _held_with(self, connection: OpenConnection) -> _Held | None:
        address = self._addresses.get(connection)
        return None if address is None else self._held[address]

    def _larger(self, count: int, *more: str) -> list[str]:
        """Return the addresses with more connections than this, and further ones that have some."""
        return [address for address, held in self._held.items() if len(held) > count or address in more]

    def _drop_waiting(self, addresses: Iterable[str]) -> bool:
        """Drop the oldest waiting connection of the address, of these, with the most of them."""
        most = max((self._held[each].waiting for each in addresses if each in self._held), key=len, default=None)
        if not most:
            return False
        self._drop(next(iter(most)))
        return True

    def _drop_request(self, addresses: Iterable[str]) -> bool:
        """Drop the last request of the address, of these, with the most connections."""
        held = [self._held[each] for each in addresses]
        most = max((each for each in held if each.is_bounded and each.working), key=len, default=None)
        if most is None:
            return False
        self._drop(next(reversed(most.working)))
        return True

    def _drop(self, connection: OpenConnection) -> None:
        self.remove(connection)
        connection.drop()


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


class RoundRobin:
    """Calls functions in the event loop: one of each client in turn, and those of one client in their order.

    After each call the loop does other work, such as work that the call has begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._scheduled = loop, False
        self._queues: dict[str, dict[object, Callable[[], None]]] = {}  # the client whose turn is next comes first

    def add(self, client: str, owner: object, call: Callable[[], None]) -> None:
        """Call a function soon, unless its owner already waits for the call of one."""
        self._queues.setdefault(client, {}).setdefault(owner, call)
        self._schedule()

    def has(self, client: str, owner: object) -> bool:
        """Whether an owner waits for the call of its function."""
        return owner in self._queues.get(client, ())

    def withdraw(self, client: str, owner: object) -> None:
        """Forget the function of an owner, if it has one."""
        queue = self._queues.get(client, {})
        if queue.pop(owner, None) is not None and not queue:
            del self._queues[client]

    def _schedule(self) -> None:
        if self._queues and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if not self._queues:
            return
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        call = queue.pop(next(iter(queue)))
        if queue:
            self._queues[client] = queue
        try:
            call()
        finally:
            self._schedule()
