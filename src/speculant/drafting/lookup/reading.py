"""Drafters that read the tokens of each sequence.

A reader is the state of one sequence. It reads the tokens that it has not seen before it drafts, and does nothing in
steps without a draft. It reads the source of an encoder-decoder model first, because summaries and edits copy from it:

    read      source, decoder prompt, output
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Protocol, cast

from typing_extensions import override

from speculant.drafting.base import StatelessDrafter
from speculant.errors import ConfigError
from speculant.kernels import MatchQuery, NativeMatches, open_matches
from speculant.types import DraftTree, Request


class SequenceReader(Protocol):
    """Reads one sequence and drafts its next tokens. seen: how many it has read, the source's included."""

    seen: int

    def update(self, tokens: Sequence[int]) -> None:
        """Read tokens that follow everything seen so far."""
        ...

    def draft(self, limit: int, ahead: Sequence[int] = ()) -> DraftTree:
        """Return a draft of at most `limit` tokens, at least 1, after the tokens seen and those `ahead` of them."""
        ...


# A reader, the tokens that it reads, those ahead of them, which it does not read, and the most tokens of its draft.
Reading = tuple[SequenceReader, Sequence[int], Sequence[int], int]


class ReadingDrafter(StatelessDrafter):
    """One `SequenceReader` per sequence, made by `make`. Beam searches get no drafts."""

    def __init__(self, make: Callable[[Request], SequenceReader]) -> None:
        self._make = make
        self._readers: dict[int, SequenceReader] = {}

    @override
    def begin(self, request: Request) -> None:
        self._readers[request.seq_id] = self._make(request)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        pairs = zip(requests, limits, strict=True)
        readings = [self._reading(request, limit) for request, limit in pairs if limit]
        drafts, empty = iter(self.draft(readings) if readings else ()), DraftTree.empty()
        return [next(drafts) if limit else empty for limit in limits]

    def draft(self, readings: Sequence[Reading]) -> Iterable[DraftTree]:
        """Read and draft. A subclass may do it for all sequences at once."""
        for reader, unread, ahead, limit in readings:
            if unread:
                reader.update(unread)
            yield reader.draft(limit, ahead)

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Do nothing: only committed tokens were read."""

    @override
    def end(self, request: Request) -> None:
        self._readers.pop(request.seq_id, None)

    def _reading(self, request: Request, limit: int) -> Reading:
        reader, tokens, committed = self._readers[request.seq_id], request.tokens, len(request.tokens)
        committed -= request.num_drafted
        first = reader.seen - len(request.source)
        unread = tokens[first:committed] if first >= 0 else [*request.source, *tokens[:committed]]
        return reader, unread, tokens[committed:] if request.num_drafted else (), limit


def note_read(readings: Sequence[Reading]) -> None:
    """Note that the unread tokens are read: by a call that follows, and fails for readers without memory alone."""
    for reader, unread, *_ in readings:
        reader.seen += len(unread)


def match_score(length: int) -> float:
    """Return a rough acceptance of a token that once followed the same `length` tokens, at least 1.

    On Python's standard library, copied from itself, the first token after a match of 1, 3, 8, and 24 or more was
    right in 22, 42, 73 and 100 of 100 cases (of 8672, 978, 142 and 60); this function returns 33, 60, 80 and 92.
    """
    return length / (length + 2)


def match_scores(length: int, count: int) -> list[float]:
    """Return the scores of tokens that follow each other, the first after a match of `length` tokens; see above."""
    return [matched / (matched + 2) for matched in range(length, length + count)]


TOKEN_BYTES = 4
LONGEST_SCORED = 32  # tokens; a longer match is scored as this one


@dataclass(frozen=True)
class LookupOptions:
    """The longest and the shortest match in tokens; the longest that is found is used."""

    prompt_lookup_max: int = 8
    prompt_lookup_min: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max={self.prompt_lookup_max} are not a "
                "range from 1 upwards",
                "use for example prompt_lookup_min=1, prompt_lookup_max=8.",
            )


class RecentMatches(SequenceReader):
    """The `SequenceReader` of one sequence. A place is the position of the token that followed a string.

    The last place where the end of a text occurred, for drafters that copy the tokens after it.

    For each length from `prompt_lookup_min` to `prompt_lookup_max` a table holds the latest places of strings of
    tokens. When a later place takes an entry, the earlier place moves to the next table. So every place is in one table
    at most, and a token moves at most one place in each table. A place after L matching tokens leaves the first L
    tables only when a later place after the same L tokens takes its entries. So one of the tables has the latest among
    the longest matches of the text's end. A token takes at most 220 bytes (110 to 130 on random tokens and on code).
    """

    def __init__(self, options: LookupOptions) -> None:
        lengths = range(options.prompt_lookup_min, options.prompt_lookup_max + 1)
        self._longest = options.prompt_lookup_max
        self._tables: list[tuple[int, dict[bytes, int]]] = [(length, {}) for length in lengths]
        self._tokens: list[int] = []
        self.seen = 0
        self._packed = bytearray()  # the tokens as bytes, of which keys are slices

    @override
    def update(self, tokens: Sequence[int]) -> None:
        self._packed += array("i", tokens).tobytes()
        for token in tokens:
            self._enter(len(self._tokens))
            self._tokens.append(token)
        self.seen += len(tokens)

    @override
    def draft(self, limit: int, ahead: Sequence[int] = ()) -> DraftTree:
        """Copy what followed the match; a copy that reaches the end of the text goes on with its own tokens."""
        end = len(self._tokens)
        self._append(ahead)  # and entered in no table
        try:
            return self._copied(limit)
        finally:
            del self._tokens[end:], self._packed[TOKEN_BYTES * end :]

    def _append(self, tokens: Sequence[int]) -> None:
        self._packed += array("i", tokens).tobytes()
        self._tokens += tokens

    def _copied(self, limit: int) -> DraftTree:
        place, length = self._find()
        copied, period = self._tokens[place : place + limit] if length else [], len(self._tokens) - place
        while copied and len(copied) < limit:
            copied.append(copied[-period])
        return copy_draft(copied, length)

    def _enter(self, place: int) -> None:
        """Enter a place as the latest; each one whose entry is taken moves on to the next table."""
        for length, table in self._tables:
            if length > place:
                break
            key = self._key(place, length)
            earlier, table[key] = table.get(key), place
            if earlier is None:
                break
            place = earlier

    def _find(self) -> tuple[int, int]:
        """Return the latest place of the longest match of the text's end, and its length; 0 = there is none."""
        end, found, longest = len(self._tokens), 0, 0
        for length, table in self._tables:
            place = table.get(self._key(end, length)) if length <= end else None
            if place is None or longest == self._longest:
                break
            matched = self._matched(place, length, self._longest)
            if matched > longest:
                found, longest = place, matched
        return found, self._matched(found, longest, LONGEST_SCORED)

    def _matched(self, place: int, length: int, most: int) -> int:
        """Return how many tokens before a place equal the text's end, from `length` to `most`."""
        tokens, most = self._tokens, min(most, place)
        while length < most and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        return length

    def _key(self, place: int, length: int) -> bytes:
        return bytes(self._packed[TOKEN_BYTES * (place - length) : TOKEN_BYTES * place])


class NativeReader(SequenceReader):
    """`RecentMatches` in the native library, at 30 bytes for each token."""

    def __init__(self, matches: NativeMatches) -> None:
        self._matches, self.seen = matches, 0

    @override
    def update(self, tokens: Sequence[int]) -> None:
        query = self.query(tokens, (), 0)
        self.seen += len(tokens)
        self._matches.look_up([query])

    @override
    def draft(self, limit: int, ahead: Sequence[int] = ()) -> DraftTree:
        return copy_draft(*self._matches.look_up([self.query((), ahead, limit)])[0])

    def query(self, unread: Sequence[int], ahead: Sequence[int], limit: int) -> MatchQuery:
        """Return the question for the next tokens; `look_up` reads the unread ones."""
        return self._matches, array("q", unread), array("q", ahead), limit


def copy_draft(tokens: list[int], length: int) -> DraftTree:
    """Return the draft of tokens that followed a match of this length; an empty one of none."""
    return DraftTree.chain(tokens, scores=match_scores(length, len(tokens))) if tokens else DraftTree.empty()


class LookupDrafter(ReadingDrafter):
    """Copies the tokens after the longest match of the text's end; the latest of equal matches counts."""

    def __init__(self, options: LookupOptions) -> None:
        super().__init__(lambda request: open_reader(options))

    @override
    def draft(self, readings: Sequence[Reading]) -> Iterable[DraftTree]:
        """Look all of them up at once, in native tables."""
        if not isinstance(readings[0][0], NativeReader):
            return super().draft(readings)
        queries = list[MatchQuery]()
        for reader, unread, ahead, limit in readings:
            queries.append(cast(NativeReader, reader).query(unread, ahead, limit))
        note_read(readings)
        return starmap(copy_draft, queries[0][0].look_up(queries))


def open_reader(options: LookupOptions) -> SequenceReader:
    """Return the reader of an empty text."""
    native = open_matches(options.prompt_lookup_min, options.prompt_lookup_max, LONGEST_SCORED)
    return RecentMatches(options) if native is None else NativeReader(native)
