"""Encoded sources in a cache: each is a sequence of its own, which texts with the same source and salt share.

    texts     seq 1 ───┐          seq 2 ───┐   seq 3 ───┐
    sources            └─── -1001 ─────────┘            └─── -1002

Their ids are negative. A source is encoded as a whole, so it
has no positions in the cache, or all. It is released with the last text that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speculant.cache.paged import KVCache

if TYPE_CHECKING:
    from torch import Tensor

MEASURED = -1000  # the id of a source that no request has

Key = tuple[str, tuple[int, ...]]  # salt, tokens


@dataclass(eq=False)
class Source:
    """A source in a cache: its sequence id, its tokens, and the sequences that hold it.

    states: the encoder's result [tokens, hidden], if a drafter reads it.
    """

    seq_id: int
    tokens: tuple[int, ...]
    holders: set[int] = field(default_factory=set)
    states: Tensor | None = None


class Sources:
    """The sources of the texts in one cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._by_key: dict[Key, Source] = {}
        self._held: dict[int, tuple[Key, Source]] = {}  # by the holder's sequence id
        self._next_id = MEASURED - 1

    def hold(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> Source:
        """Let a text hold its source, which it may hold already."""
        if seq_id not in self._held:
            key = cache_salt, tuple(tokens)
            if key not in self._by_key:
                self._by_key[key] = Source(self._next_id, key[1])
                self._next_id -= 1
            self._held[seq_id] = key, self._by_key[key]
        source = self._held[seq_id][1]
        source.holders.add(seq_id)
        return source

    def of(self, seq_id: int) -> Source | None:
        """Return the source that a text holds; None = it holds none."""
        return self._held[seq_id][1] if seq_id in self._held else None

    def is_encoded(self, source: Source) -> bool:
        """Whether the cache has the source's keys and values."""
        return self._cache.length(source.seq_id) == len(source.tokens)

    def missing(self) -> Iterator[Source]:
        """Yield the sources that are not encoded."""
        return (source for source in self._by_key.values() if not self.is_encoded(source))

    def release(self, seq_id: int) -> None:
        """Let a text release its source, if it holds one; nobody else's source is removed from the cache."""
        if seq_id not in self._held:
            return
        key, source = self._held.pop(seq_id)
        source.holders.remove(seq_id)
        if not source.holders:
            del self._by_key[key]
            self._cache.release(source.seq_id)

    def check(self) -> None:
        """Assert that each source is whole or absent in the cache, and that texts hold exactly the sources here."""
        held = {source.seq_id: source for _, source in self._held.values()}
        assert {each.seq_id for each in self._by_key.values()} == set(held), "a source without a text, or the reverse"
        for source in held.values():
            assert self._cache.length(source.seq_id) in (0, len(source.tokens)), "a source is encoded in part"
            holders = {seq_id for seq_id, (_, each) in self._held.items() if each is source}
            assert source.holders == holders, "a text holds another source"
