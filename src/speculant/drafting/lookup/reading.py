"""Drafters that read the tokens of each sequence as they come.

A reader is the state of one sequence. It reads committed tokens when they are observed, a prompt chunk by chunk, and
all remaining tokens before it drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from speculant.drafting.base import StatelessDrafter
from speculant.types import CommittedRows, DraftTree, Request


class SequenceReader(Protocol):
    """Reads one sequence and drafts its next tokens."""

    @property
    def seen(self) -> int:
        """The number of tokens that were read."""
        ...

    def update(self, tokens: Sequence[int]) -> None:
        """Read tokens that follow everything seen so far."""
        ...

    def draft(self, limit: int, ahead: Sequence[int] = ()) -> DraftTree:
        """Return a draft of at most `limit` tokens, at least 1, after the tokens seen and those `ahead` of them."""
        ...


class ReadingDrafter(StatelessDrafter):
    """One `SequenceReader` per sequence, made by `make`. Beam searches get no drafts and are not read."""

    def __init__(self, make: Callable[[Request], SequenceReader]) -> None:
        self._make = make
        self._readers: dict[int, SequenceReader] = {}

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._readers[request.seq_id] = self._make(request)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        if request.search is None:
            self._read(request, len(request.tokens) if rows.gained else rows.start + len(rows.tokens))

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`; only committed tokens were read."""

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self._readers.pop(request.seq_id, None)

    def _propose_one(self, request: Request, limit: int) -> DraftTree:
        if limit == 0:
            return DraftTree.empty()
        committed = len(request.tokens) - request.num_drafted
        return self._read(request, committed).draft(limit, request.tokens[committed:])

    def _read(self, request: Request, end: int) -> SequenceReader:
        reader = self._readers[request.seq_id]
        if end > reader.seen:
            reader.update(request.tokens[reader.seen : end])
        return reader


def match_score(length: int) -> float:
    """Return a rough acceptance of a token that once followed the same `length` tokens, at least 1.

    On Python's standard library, copied from itself, the first token after a match of 1, 3, 8, and 24 or more was
    right in 22, 42, 73 and 100 of 100 cases (of 8672, 978, 142 and 60); this function returns 33, 60, 80 and 92.
    """
    return length / (length + 2)
