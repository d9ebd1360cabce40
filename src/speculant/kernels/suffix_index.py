"""Counts of the tokens that followed each string: the index protocol, its reference, and the native one.

An index of depth D counts, for every string of up to D - 1 tokens in its texts, the tokens that followed it. A
continuation takes the most frequent token again and again, until match and draft together have D tokens.

The automaton (Blumer et al.; docs/references.md, suffix automaton) has one state for all strings that end at the same
places, at most 2n states and 3n edges for n tokens. A state's link leads to its longest suffix that also ends at other
places, so the links from a text's end visit all of its suffixes. A new token adds one to an edge of each suffix of up
to D - 1 tokens. An update takes amortised O(1) for the automaton and at most D - 1 steps for counts.

The native index (csrc/suffix.cpp) has the same results. Native tables (csrc/matches.cpp) have those of `RecentMatches`
in drafting/lookup/reading.py.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, cast

from typing_extensions import override

from speculant.kernels.native import address, load_library

NONE = -1  # no state, or no edge
ROOT = 0  # the state of the empty string
TOKEN_BITS = 32  # an edge's key is state << TOKEN_BITS | token
STATE_BYTES, EDGE_BYTES = 22, 18 + 150  # at most; 150 for an edge's key and value in the dict


@dataclass(frozen=True)
class SuffixSettings:
    """The depth of an index, and the limits of continuations.

    depth: the most tokens of match and continuation together, at least 2. factor: a match of L tokens is continued by
    at most floor(factor * L). min_prob: a continuation ends before the product of its ratios is below it.
    """

    depth: int = 24
    factor: float = 1.0
    min_prob: float = 0.1


class Continuation(NamedTuple):
    """Tokens that followed a match of `length` tokens; 0 = no match.

    ratios: for each token, its count / the count of all tokens that followed the same string.
    """

    tokens: list[int]
    ratios: list[float]
    length: int

    @property
    def score(self) -> float:
        """The sum of the products of ratios: the expected accepted tokens if ratios were probabilities."""
        product, total = 1.0, 0.0
        for ratio in self.ratios:
            product *= ratio
            total += product
        return total


NOTHING = Continuation([], [], 0)


class SuffixIndex(Protocol):
    """Texts, indexed by the tokens that followed their substrings."""

    def begin(self) -> None:
        """Begin another text with the next tokens."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current text."""
        ...

    def continuation(self, context: Sequence[int], limit: int) -> Continuation:
        """Return the continuation of a suffix of `context` with the best score; on a tie, of the longest suffix.

        It has at most `limit` tokens. Among equally frequent tokens it takes the one that was counted last.
        """
        ...

    def look_up(self, queries: Sequence[SuffixQuery]) -> list[Continuation]:
        """Return each query's continuation with the best score, of the earlier index on a tie.

        All indexes are of this one's kind. After a MemoryError, an index may lack tokens.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """The memory of the index, in bytes."""
        ...


# The indexes that may continue a text, its own first; the tokens to append to that one; those ahead of them, which are
# not appended; and the most tokens of the continuation.
SuffixQuery = tuple[Sequence[SuffixIndex], Sequence[int], Sequence[int], int]


def lengths_of_continuations(settings: SuffixSettings) -> list[int]:
    """Return the most tokens of a continuation after a match of 0, 1, ... depth - 1 tokens."""
    return [min(int(settings.factor * length), settings.depth - length) for length in range(settings.depth)]


class SuffixAutomaton(SuffixIndex):
    """The reference of `SuffixIndex`, in plain Python: arrays by state and by edge, and a dict of the edges."""

    def __init__(self, settings: SuffixSettings) -> None:
        self._most_recent, self._min_prob = settings.depth - 1, settings.min_prob
        self._most_tokens = lengths_of_continuations(settings)
        self._lengths, self._links = array("i"), array("i")  # of each state: the length of its longest string; its link
        self._followed, self._best = (
            array("i"),
            array("i"),
        )  # of each state: how often a token followed; its most frequent edge
        self._first = array("i")  # of each state: the first of its edges
        self._tokens, self._targets = array("i"), array("i")  # of each edge
        self._counts, self._next = array("i"), array("i")  # of each edge; the state's next one
        self._edges: dict[int, int] = {}  # by state and token
        self._add_state(0)
        self.begin()

    @override
    def begin(self) -> None:
        self._end = ROOT  # the state of the whole text
        self._recent, self._num_recent = ROOT, 0  # the state of its last tokens, as many as are counted
        self._tail = list[int]()  # these tokens

    @override
    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._end = self._grow(self._end, token)
            self._recent = self._holder(self._recent, self._num_recent)
            self._count(token)
            self._num_recent = min(self._num_recent + 1, self._most_recent)
            target = self._targets[self._edges[self._recent << TOKEN_BITS | token]]
            self._recent = self._holder(target, self._num_recent)
        self._tail = [*self._tail, *tokens][-self._most_recent :]

    @override
    def look_up(self, queries: Sequence[SuffixQuery]) -> list[Continuation]:
        found = list[Continuation]()
        for indexes, unread, ahead, limit in queries:
            own = cast(SuffixAutomaton, indexes[0])
            own.extend(unread)
            context = [*own._tail, *ahead]
            found.append(max([index.continuation(context, limit) for index in indexes], key=attrgetter("score")))
        return found

    @override
    def continuation(self, context: Sequence[int], limit: int) -> Continuation:
        state, length = self._match(context[-self._most_recent :])
        best, best_score = NOTHING, 0.0
        while state > ROOT:
            link = self._links[state]
            most = min(limit, max(self._most_tokens[self._lengths[link] + 1 : length + 1]))
            if most > best_score:  # no ratio is above 1
                found, score = self._follow(state, length, most)
                if score > best_score:
                    best, best_score = found, score
            state, length = link, self._lengths[link]
        return best

    @property
    @override
    def num_bytes(self) -> int:
        return STATE_BYTES * len(self._lengths) + EDGE_BYTES * len(self._tokens)

    def _grow(self, end: int, token: int) -> int:
        """Append a token to the text of the state `end`; return the state of the longer text."""
        known = self._edges.get(end << TOKEN_BITS | token)
        if known is not None:  # an earlier text has it
            return self._part(end, token, self._targets[known])
        made, state = self._add_state(self._lengths[end] + 1), end
        while state != NONE and (state << TOKEN_BITS | token) not in self._edges:
            self._add_edge(state, token, made)
            state = self._links[state]
        if state == NONE:
            self._links[made] = ROOT
        else:
            target = self._targets[self._edges[state << TOKEN_BITS | token]]
            self._links[made] = self._part(state, token, target)
        return made

    def _part(self, state: int, token: int, target: int) -> int:
        """Return the state of the strings of `state` plus a token; `target` has these and maybe longer ones."""
        if self._lengths[target] == self._lengths[state] + 1:
            return target
        part = self._add_state(self._lengths[state] + 1)
        self._links[part], self._links[target] = self._links[target], part
        self._followed[part] = self._followed[target]
        edge = self._first[target]
        while edge != NONE:
            copied = self._add_edge(part, self._tokens[edge], self._targets[edge])
            self._counts[copied] = self._counts[edge]
            if edge == self._best[target]:
                self._best[part] = copied
            edge = self._next[edge]
        while state != NONE:
            edge = self._edges[state << TOKEN_BITS | token]
            if self._targets[edge] != target:
                break
            self._targets[edge], state = part, self._links[state]
        return part

    def _count(self, token: int) -> None:
        """Count a token as a follower of every suffix of the recent tokens."""
        state = self._recent
        while state != NONE:
            edge, best = self._edges[state << TOKEN_BITS | token], self._best[state]
            self._followed[state] += 1
            self._counts[edge] += 1
            if best == NONE or self._counts[edge] >= self._counts[best]:
                self._best[state] = edge
            state = self._links[state]

    def _holder(self, state: int, length: int) -> int:
        """Return the state of the suffix of this length of a state's strings."""
        while state != ROOT and self._lengths[self._links[state]] >= length:
            state = self._links[state]
        return state

    def _match(self, context: Sequence[int]) -> tuple[int, int]:
        """Return the state and the length of the longest suffix of a context that is in the index."""
        state, length = ROOT, 0
        for token in context:
            while (edge := self._edges.get(state << TOKEN_BITS | token)) is None and state != ROOT:
                state = self._links[state]
                length = self._lengths[state]
            if edge is not None:
                state, length = self._targets[edge], length + 1
        return state, length

    def _follow(self, state: int, length: int, most: int) -> tuple[Continuation, float]:
        """Follow the most frequent edges from the state of a match of this length; return them with their score."""
        tokens, ratios = list[int](), list[float]()
        product, score = 1.0, 0.0
        while len(tokens) < most and (edge := self._best[state]) != NONE:
            ratio = self._counts[edge] / self._followed[state]
            product *= ratio
            if product < self._min_prob:
                break
            score += product
            tokens.append(self._tokens[edge])
            ratios.append(ratio)
            state = self._targets[edge]
        return Continuation(tokens, ratios, length), score

    def _add_state(self, length: int) -> int:
        self._lengths.append(length)
        for column in (self._links, self._best, self._first):
            column.append(NONE)
        self._followed.append(0)
        return len(self._lengths) - 1

    def _add_edge(self, state: int, token: int, target: int) -> int:
        edge = len(self._tokens)
        self._tokens.append(token)
        self._targets.append(target)
        self._counts.append(0)
        self._next.append(self._first[state])
        self._first[state] = edge
        self._edges[state << TOKEN_BITS | token] = edge
        return edge


_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("sp_suffix_new", c_void_p, [c_int64, c_double, c_double]),
    ("sp_suffix_delete", None, [c_void_p]),
    ("sp_suffix_begin", None, [c_void_p]),
    ("sp_suffix_extend", c_int, [c_void_p, c_void_p, c_int64]),
    ("sp_suffix_look_up", c_int, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 3]),
    ("sp_suffix_bytes", c_int64, [c_void_p]),
    ("sp_matches_new", c_void_p, [c_int64, c_int64, c_int64]),
    ("sp_matches_delete", None, [c_void_p]),
    ("sp_matches_look_up", c_int, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    ("sp_matches_bytes", c_int64, [c_void_p]),
)


class NativeSuffixIndex(SuffixIndex):
    """See `SuffixIndex`. The library owns the memory for the life of this object."""

    def __init__(self, library: ctypes.CDLL, settings: SuffixSettings) -> None:
        self._library, self._depth = library, settings.depth
        self._index = library.sp_suffix_new(settings.depth, settings.factor, settings.min_prob)
        if self._index is None:
            raise MemoryError("no memory for a suffix index")
        weakref.finalize(self, library.sp_suffix_delete, self._index)

    @override
    def begin(self) -> None:
        self._library.sp_suffix_begin(self._index)

    @override
    def extend(self, tokens: Sequence[int]) -> None:
        given = array("q", tokens)
        if not self._library.sp_suffix_extend(self._index, address(given), len(given)):
            raise MemoryError(f"no memory for {len(given)} more tokens in a suffix index")

    @override
    def continuation(self, context: Sequence[int], limit: int) -> Continuation:
        return self._ask(array("q", (1, 0, len(context), limit, 1)), array("Q", [self._index]), array("q", context))[0]

    @override
    def look_up(self, queries: Sequence[SuffixQuery]) -> list[Continuation]:
        numbers, given, texts = array("q"), array("Q"), array("q")
        for indexes, unread, ahead, limit in queries:
            numbers.extend((len(indexes), len(unread), len(ahead), limit, 0))
            given.extend([index._index for index in cast("Sequence[NativeSuffixIndex]", indexes)])
            texts.extend(unread)
            texts.extend(ahead)
        return self._ask(numbers, given, texts)

    def _ask(self, numbers: array[int], indexes: array[int], texts: array[int]) -> list[Continuation]:
        """Call `sp_suffix_look_up`; each query has five of the numbers."""
        count, room = len(numbers) // 5, self._depth
        tokens, ratios = array("q", bytes(8 * room * (count + 1))), array("d", bytes(8 * room * (count + 1)))
        found = array("q", bytes(16 * count))
        at = [memory.buffer_info()[0] for memory in (numbers, indexes, texts, tokens, ratios, found)]
        if not self._library.sp_suffix_look_up(at[0], count, *at[1:3], room, *at[3:]):
            raise MemoryError("no memory for more tokens in a suffix index")
        continuations, first = list[Continuation](), 0
        for made, matched in zip(found[::2], found[1::2], strict=True):
            end = first + made
            continuations.append(
                Continuation(tokens[first:end].tolist(), ratios[first:end].tolist(), matched) if made else NOTHING
            )
            first += room
        return continuations

    @property
    @override
    def num_bytes(self) -> int:
        return int(self._library.sp_suffix_bytes(self._index))


def open_native(settings: SuffixSettings) -> NativeSuffixIndex | None:
    """Return an empty index; None if the library was not built."""
    library = _load()
    return None if library is None else NativeSuffixIndex(library, settings)


@functools.cache
def _load() -> ctypes.CDLL | None:
    library = load_library()
    if library is not None:
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def open_suffix_index(settings: SuffixSettings) -> SuffixIndex:
    """Return an empty index."""
    return open_native(settings) or SuffixAutomaton(settings)


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
        """Return the tokens that follow each text's match, and the length of the match."""
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
