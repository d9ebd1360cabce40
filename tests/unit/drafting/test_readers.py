"""All readers of a text: drafted tokens may follow the committed ones, and are not read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from speculant.drafting import Drafter, RecyclingOptions, SequenceReader, TokenRecycling, copy_of
from speculant.drafting.lookup import ngram, reading, suffix
from speculant.types import Request
from tests.models import VOCAB_SIZE, make_request

TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2]
READERS: dict[str, Callable[[], SequenceReader]] = {
    "ngram": lambda: ngram.Predictor(ngram.NgramOptions()),
    "recent match": lambda: reading.RecentMatches(reading.LookupOptions()),
    "suffix": lambda: suffix.SuffixDrafter(suffix.SuffixOptions())._make(make_request([1])),
}


@pytest.mark.parametrize("name", READERS)
def test_reader_continues_tokens_that_are_ahead(name: str) -> None:
    reader, longer = READERS[name](), READERS[name]()
    reader.update(TEXT)
    longer.update([*TEXT, 3])
    assert reader.draft(3, [3]).token_list == longer.draft(3).token_list != []


@pytest.mark.parametrize("name", READERS)
def test_reader_forgets_tokens_that_are_ahead(name: str) -> None:
    reader, other = READERS[name](), READERS[name]()
    for each in (reader, other):
        each.update(TEXT)
    reader.draft(3, [3, 4, 9, 9])
    reader.update([3])
    other.update([3])
    assert reader.seen == other.seen == len(TEXT) + 1
    assert reader.draft(6).token_list == other.draft(6).token_list


SOURCE = [8, 30, 31, 32, 33, 34, 9]
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: ngram.NgramDrafter(ngram.NgramOptions()),
    "prompt lookup": lambda: reading.LookupDrafter(reading.LookupOptions()),
    "suffix": lambda: suffix.SuffixDrafter(suffix.SuffixOptions()),
    "token recycling": lambda: TokenRecycling(RecyclingOptions(), VOCAB_SIZE),
}


def copied(drafter: Drafter, request: Request, limit: int = 3) -> list[int]:
    (tree,) = drafter.propose([request], [limit])
    return tree.token_list


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_source_is_copied(name: str) -> None:
    """Also in the first draft, and after drafts that were rejected; without it there is nothing to copy."""
    drafter, request = DRAFTERS[name](), make_request([0], [31], source=tuple(SOURCE))
    drafter.begin(request)
    assert copied(drafter, request, 1) == [32]
    request.extend([50, 51, 30, 31, 32])
    assert copied(drafter, request, 2) == [33, 34]
    other = make_request([0], [31], seq_id=2)
    drafter.begin(other)
    assert copied(drafter, other) == []


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_comes_before_the_source(name: str) -> None:
    drafter = DRAFTERS[name]()
    request = make_request([0], [31, 40, 41, 31, 40, 42, 31], source=tuple(SOURCE))
    drafter.begin(request)
    assert copied(drafter, request, 1) == [40]


def test_the_end_of_an_output_is_learnt_without_its_source() -> None:
    drafter = suffix.SuffixDrafter(suffix.SuffixOptions())
    request = make_request([0], [60, 61, 62, 63], source=tuple(SOURCE), reason="length")
    drafter.begin(request)
    copied(drafter, request)
    drafter.end(request)
    other = make_request([0], [60, 61], seq_id=2, source=(7,))
    drafter.begin(other)
    assert copied(drafter, other, 2) == [62, 63]
    assert drafter.store.num_tokens == 5


def test_copies_of_requests_have_their_source() -> None:
    """The inner drafter of a cascade copies from it too."""
    request = make_request([0], [31], source=tuple(SOURCE))
    assert copy_of(request).source == request.source
