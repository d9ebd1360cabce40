"""All readers of a text: drafted tokens may follow the committed ones, and are not read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from speculant.drafting.lookup import ngram, recent_match, suffix
from speculant.drafting.lookup.reading import SequenceReader
from tests.models import make_request

TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2]
READERS: dict[str, Callable[[], SequenceReader]] = {
    "ngram": lambda: ngram.Predictor(ngram.NgramOptions()),
    "recent match": lambda: recent_match.RecentMatches(recent_match.LookupOptions()),
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
