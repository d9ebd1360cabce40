"""The native tables of recent matches (csrc/matches.cpp); their reference is in drafting/lookup/reading.py."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any

from speculant.kernels.native import load_functions

_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("sp_matches_new", c_void_p, [c_int64, c_int64, c_int64]),
    ("sp_matches_delete", None, [c_void_p]),
    ("sp_matches_look_up", c_int, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    ("sp_matches_bytes", c_int64, [c_void_p]),
)


class NativeMatches:
    """The tables of one text: the latest places of its strings of `shortest` to `longest` tokens.

    Matches are measured up to `most_scored` tokens. The library owns the memory for the life of this object.
    """

    def __init__(self, library: ctypes.CDLL, shortest: int, longest: int, most_scored: int) -> None:
        self._library = library
        self._tables = library.sp_matches_new(shortest, longest, most_scored)
        if self._tables is None:
            raise MemoryError("no memory for the tables of a text")
        weakref.finalize(self, library.sp_matches_delete, self._tables)

    def look_up(self, queries: Sequence[MatchQuery]) -> list[tuple[list[int], int]]:
        """Return the tokens that follow each text's match, and the length of the match; of tables of this library."""
        tables, numbers, texts, count = array("Q"), array("q"), array("q"), len(queries)
        for matches, unread, ahead, limit in queries:
            tables.append(matches._tables)
            numbers.extend((len(unread), len(ahead), limit))
            texts.extend(unread)
            texts.extend(ahead)
        room = max(numbers[2::3])
        drafted, matched = array("q", bytes(8 * room * count)), array("q", bytes(8 * count))
        at = [memory.buffer_info()[0] for memory in (numbers, tables, texts, drafted, matched)]
        if not self._library.sp_matches_look_up(at[0], count, *at[1:3], room, *at[3:]):
            raise MemoryError("no memory for more tokens in the tables of a text")
        found, first = list[tuple[list[int], int]](), 0
        for limit, length in zip(numbers[2::3], matched, strict=True):
            found.append((drafted[first : first + limit].tolist() if length else [], length))
            first += room
        return found

    @property
    def num_bytes(self) -> int:
        """The memory of the tables, in bytes."""
        return int(self._library.sp_matches_bytes(self._tables))


# The tables of a text; the tokens that they read; those ahead of them, which are not read; and the most drafted tokens.
MatchQuery = tuple[NativeMatches, Sequence[int], Sequence[int], int]


def open_matches(shortest: int, longest: int, most_scored: int) -> NativeMatches | None:
    """Return empty tables; None if the library was not built."""
    library = _load()
    return None if library is None else NativeMatches(library, shortest, longest, most_scored)


@functools.cache
def _load() -> ctypes.CDLL | None:
    return load_functions(_FUNCTIONS)
