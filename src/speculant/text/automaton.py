"""An automaton that finds words in a sequence as it grows (Aho and Corasick, doi:10.1145/360825.360855)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol")


class Beginning(Generic[Symbol]):
    """A beginning of some words: the longest one with which a sequence ends.

    depth: its number of symbols. shorter: the longest other beginning with which it ends. ends: the words with which it
    ends, by number, longest first.
    """

    __slots__ = ("depth", "ends", "longer", "shorter")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.longer: dict[Symbol, Beginning[Symbol]] = {}
        self.shorter: Beginning[Symbol] | None = None
        self.ends: tuple[int, ...] = ()

    def after(self, symbol: Symbol) -> Beginning[Symbol]:
        """Return the longest beginning with which the sequence ends, one symbol later. Amortised O(1)."""
        node = self
        while symbol not in node.longer:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.longer[symbol]


def beginnings_of(words: Iterable[Sequence[Symbol]]) -> Beginning[Symbol]:
    """Return the empty beginning, where a sequence starts. Time is linear in the symbols of all words.

    Beginnings are immutable afterwards, so any number of searches, in any threads, can share them.
    """
    root = Beginning[Symbol]()
    for number, word in enumerate(words):
        node = root
        for symbol in word:
            node = node.longer.setdefault(symbol, Beginning(node.depth + 1))
        node.ends += (number,)
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for symbol, longer in node.longer.items():
            longer.shorter = root if node.shorter is None else node.shorter.after(symbol)
            longer.ends += longer.shorter.ends
            queue.append(longer)
    return root
