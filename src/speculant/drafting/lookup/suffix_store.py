"""The texts of finished requests, indexed by the tokens that followed their substrings, within a bound.

There are two generations of half the bound each. Texts enter the newer one; when it is full, the older one is dropped
and the newer takes its place. So the newest half of the bound is always kept, nothing is ever deleted from an index,
and memory is freed at once. Texts of different salts have indexes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speculant.kernels.suffix_index import Continuation, SuffixIndex


@dataclass
class TextGeneration:
    """Texts of the same age, by salt."""

    indexes: dict[str, SuffixIndex] = field(default_factory=dict)
    num_texts: int = 0
    num_tokens: int = 0


class SuffixStore:
    """At most `most_texts` texts of at most `most_tokens` tokens together; 0 of either = none."""

    def __init__(self, most_texts: int, most_tokens: int, open_index: Callable[[], SuffixIndex]) -> None:
        self._most_texts, self._half_texts = most_texts, max(1, most_texts // 2)
        self._half_tokens = most_tokens // 2 if most_texts else 0
        self._open_index = open_index
        self._older, self._newer = TextGeneration(), TextGeneration()

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a text; of one that is longer than half the bound, its end."""
        if not self._half_tokens:
            return
        kept = tokens[-self._half_tokens :]
        self._make_room(len(kept))
        if salt not in self._newer.indexes:
            self._newer.indexes[salt] = self._open_index()
        index = self._newer.indexes[salt]
        index.begin()
        index.extend(kept)
        self._newer.num_texts += 1
        self._newer.num_tokens += len(kept)

    def continuations(self, salt: str, context: Sequence[int], limit: int) -> list[Continuation]:
        """Return the continuations of a context in the texts of this salt, of newer ones first."""
        indexes = (each.indexes.get(salt) for each in (self._newer, self._older))
        return [index.continuation(context, limit) for index in indexes if index is not None]

    @property
    def num_texts(self) -> int:
        """How many texts it holds."""
        return self._older.num_texts + self._newer.num_texts

    @property
    def num_tokens(self) -> int:
        """How many tokens it holds."""
        return self._older.num_tokens + self._newer.num_tokens

    @property
    def num_bytes(self) -> int:
        """The memory that its indexes take, in bytes."""
        return sum(index.num_bytes for each in (self._older, self._newer) for index in each.indexes.values())

    def _make_room(self, num_tokens: int) -> None:
        full = self._newer.num_tokens + num_tokens > self._half_tokens
        if full or self._newer.num_texts >= self._half_texts:
            self._older, self._newer = self._newer, TextGeneration()
        if self.num_texts >= self._most_texts:  # only where the bound is a single text
            self._older = TextGeneration()
