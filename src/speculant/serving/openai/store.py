"""Stored responses: in memory, for a while, within a number of bytes that clients share fairly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SHARE = 4  # one client's responses have at most a quarter of all bytes
PER_RESPONSE, PER_ITEM = 1000, 300  # bytes in memory besides the JSON texts, about


class StoredItem(NamedTuple):
    """An item of a conversation. data: its JSON."""

    id: str
    data: bytes


class Turn:
    """The items that one response adds to a conversation. Responses that continue it share it.

    previous: the turn before; None = the conversation begins here. size: bytes of this turn in memory. whole: bytes of
    the conversation. length, total: items of the conversation, and bytes of their JSON.
    """

    def __init__(
        self, inputs: Sequence[StoredItem], outputs: Sequence[StoredItem] = (), previous: Turn | None = None
    ) -> None:
        self.inputs, self.outputs, self.previous = tuple(inputs), tuple(outputs), previous
        own = list(self.own())
        self.length, self.total = len(own), sum(len(item.data) for item in own)
        self.size = self.whole = self.total + sum(len(item.id) + PER_ITEM for item in own)
        if previous is not None:
            self.whole += previous.whole
            self.length += previous.length
            self.total += previous.total
        self.holders = 0  # stored responses, and turns that have holders, that need this one

    def own(self) -> Iterator[StoredItem]:
        """Yield the items of this turn."""
        yield from self.inputs
        yield from self.outputs

    def items(self) -> list[StoredItem]:
        """Return the items of the whole conversation."""
        return [*self.before(), *self.own()]

    def before(self) -> list[StoredItem]:
        """Return the items of the earlier turns."""
        turns, turn = list[Turn](), self.previous
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return [item for each in reversed(turns) for item in each.own()]


@dataclass(eq=False)
class StoredResponse:
    """A response. document: its JSON. expires: on the store's clock.

    task: generates it, if it is in the background. needed: bytes that the task holds, such as the request's body.
    """

    id: str
    owner: str
    status: str
    document: bytes
    turn: Turn
    expires: float = 0.0
    task: asyncio.Task[None] | None = None
    needed: int = 0

    @property
    def size(self) -> int:
        """Bytes without its turn's."""
        return len(self.document) + self.needed + PER_RESPONSE


class Timer(Protocol):
    """A call that is planned."""

    def cancel(self) -> None:
        """Do not make the call."""


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class ResponseStore:
    """The stored responses of all clients. Each belongs to its owner; for others it does not exist.

    most: bytes of all; 0 = nothing is stored. A client may use a quarter of them. Beyond a bound the oldest response of
    the client that uses the most is deleted. ttl: seconds from a response's addition to its deletion. clock and later:
    the time in seconds, and a way to plan a call. For use in one event loop.
    """

    def __init__(
        self,
        most: int,
        ttl: float,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        self.most, self.ttl = most, ttl
        self._clock, self._later = clock, later
        self._responses: dict[str, StoredResponse] = {}  # the oldest first
        self._owned: dict[str, dict[str, StoredResponse]] = {}  # by owner, the oldest first
        self._items: dict[tuple[str, str], dict[int, StoredItem]] = {}  # by owner and id, then by identity
        self._used: dict[str, int] = {}  # bytes by owner
        self.total = 0  # bytes of all owners
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._responses)

    def used(self, owner: str) -> int:
        """Return the bytes of one client."""
        return self._used.get(owner, 0)

    def add(self, response: StoredResponse) -> bool:
        """Store a response whose id is new, and return True; False if it alone, with its conversation, is too large."""
        self.expire()
        if response.size + response.turn.whole > self.most // SHARE:
            return False
        response.expires = self._clock() + self.ttl
        self._responses[response.id] = response
        self._owned.setdefault(response.owner, {})[response.id] = response
        self._charge(response.owner, response.size)
        self._hold(response.owner, response.turn)
        self._keep_bounds()
        self._plan()
        return True

    def update(
        self, response: StoredResponse, status: str, document: bytes, turn: Turn | None = None, needed: int = 0
    ) -> None:
        """Replace a response's document, and its turn if one is given. It stays deleted if it was deleted meanwhile.

        needed: see `StoredResponse`; 0 = its task is at its end.
        """
        size, before = response.size, response.turn
        response.status, response.document, response.turn, response.needed = status, document, turn or before, needed
        if self._responses.get(response.id) is not response:
            return
        self._charge(response.owner, response.size - size)
        self._release(response.owner, before)
        self._hold(response.owner, response.turn)
        self._keep_bounds()

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response of an owner; None if it does not exist or has another owner."""
        self.expire()
        found = self._responses.get(response_id)
        return found if found is not None and found.owner == owner else None

    def find_item(self, owner: str, item_id: str) -> StoredItem | None:
        """Return an item of an owner's conversations: of several that were sent with one id, the oldest."""
        self.expire()
        return next(iter(self._items.get((owner, item_id), {}).values()), None)

    def remove(self, response: StoredResponse) -> None:
        """Delete a response, and its items unless a stored response continues it. A task that generates it ends."""
        if self._responses.get(response.id) is not response:
            return
        del self._responses[response.id]
        owned = self._owned[response.owner]
        del owned[response.id]
        if not owned:
            del self._owned[response.owner]
        self._charge(response.owner, -response.size)
        self._release(response.owner, response.turn)
        if response.task is not None:
            response.task.cancel()

    def expire(self) -> None:
        """Delete the responses whose time is over."""
        now = self._clock()
        while self._responses and (oldest := next(iter(self._responses.values()))).expires <= now:
            self.remove(oldest)

    def check(self) -> None:
        """Raise AssertionError unless the bytes are those of the stored responses, and each turn is counted once."""
        for owner in {*self._used, *self._owned}:
            owned = self._owned.get(owner, {}).values()
            turns, left = set[Turn](), [each.turn for each in owned]
            while left:
                turn = left.pop()
                if turn not in turns:
                    turns.add(turn)
                    left += [] if turn.previous is None else [turn.previous]
            size = sum(each.size for each in owned) + sum(turn.size for turn in turns)
            assert self.used(owner) == size, (owner, self.used(owner), size)
            known = {(item.id, id(item)) for turn in turns for item in turn.own()}
            assert {(name, key) for (who, name), same in self._items.items() if who == owner for key in same} == known
        assert self.total == sum(self._used.values())

    def _charge(self, owner: str, size: int) -> None:
        self.total += size
        self._used[owner] = self._used.get(owner, 0) + size
        if self._used[owner] == 0:
            del self._used[owner]

    def _hold(self, owner: str, turn: Turn | None) -> None:
        """Count one more holder of a turn; the first one holds the turns before it, too."""
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                return
            self._charge(owner, turn.size)
            for item in turn.own():
                self._items.setdefault((owner, item.id), {})[id(item)] = item
            turn = turn.previous

    def _release(self, owner: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders -= 1
            if turn.holders > 0:
                return
            self._charge(owner, -turn.size)
            for item in turn.own():
                same = self._items[owner, item.id]
                del same[id(item)]
                if not same:
                    del self._items[owner, item.id]
            turn = turn.previous

    def _keep_bounds(self) -> None:
        while self._used:
            owner = max(self._used, key=self.used)
            if self.used(owner) <= self.most // SHARE and self.total <= self.most:
                return
            self.remove(next(iter(self._owned[owner].values())))

    def _plan(self) -> None:
        """Plan the next deletion, so that nothing stays in memory beyond its time."""
        if self._timer is None and self._responses:
            oldest = next(iter(self._responses.values()))
            self._timer = self._later(max(0.0, oldest.expires - self._clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.expire()
        self._plan()
