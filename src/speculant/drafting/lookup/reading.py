"""Drafters that read the tokens of each sequence.

A reader is the state of one sequence. It reads the tokens that it has not seen before it drafts, and does nothing in
steps without a draft. It reads the source of an encoder-decoder model first, because summaries and edits copy from it:

    read      source, decoder prompt, output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

from speculant.drafting.base import StatelessDrafter
from speculant.types import DraftTree, Request


class SequenceReader(Protocol):
    """Reads one sequence and drafts its next tokens. seen: how many it has read, those of the source included."""

    seen: int

    def update(self, tokens: Sequence[int]) -> None:
        """Read tokens that follow everything seen so far."""
        ...

    def draft(self, limit: int, ahead: Sequence[int] = ()) -> DraftTree:
        """Return a draft of at most `limit` tokens, at least 1, after the tokens seen and those `ahead` of them."""
        ...


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
        return [self._propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`; only committed tokens were read."""

    @override
    def end(self, request: Request) -> None:
        self._readers.pop(request.seq_id, None)

    def _propose_one(self, request: Request, limit: int) -> DraftTree:
        if limit == 0:
            return DraftTree.empty()
        committed = len(request.tokens) - request.num_drafted
        reader = self._readers[request.seq_id]
        if request.source and not reader.seen:
            reader.update(request.source)
        first = reader.seen - len(request.source)
        if committed > first:
            reader.update(request.tokens[first:committed])
        return reader.draft(limit, request.tokens[committed:])


def match_score(length: int) -> float:
    """Return a rough acceptance of a token that once followed the same `length` tokens, at least 1.

    On Python's standard library, copied from itself, the first token after a match of 1, 3, 8, and 24 or more was
    right in 22, 42, 73 and 100 of 100 cases (of 8672, 978, 142 and 60); this function returns 33, 60, 80 and 92.
    """
    return length / (length + 2)
