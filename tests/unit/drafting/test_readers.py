"""All readers of a text: drafted tokens may follow the committed ones, and are not read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from speculant.drafting import Drafter, RecyclingOptions, SequenceReader, TokenRecycling, copy_of
from speculant.drafting.lookup import ngram, reading, suffix
from speculant.kernels import SuffixAutomaton
from speculant.types import Request
from tests.examples import examples
from tests.models import VOCAB_SIZE, make_request
from tests.small_models import NATIVE

TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2]
READERS: dict[str, Callable[[], SequenceReader]] = {
    "ngram": lambda: ngram.Predictor(ngram.NgramOptions()),
    "recent match": lambda: reading.RecentMatches(reading.LookupOptions()),
    "native match": lambda: reading.open_reader(reading.LookupOptions()),
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


MOST_TOKEN = 2**31 - 1
PAIRS: dict[str, tuple[Callable[[], Drafter], Callable[[], Drafter]]] = {
    "prompt lookup": (
        lambda: reading.LookupDrafter(reading.LookupOptions(4, 2)),
        lambda: reading.ReadingDrafter(lambda request: reading.RecentMatches(reading.LookupOptions(4, 2))),
    ),
    "suffix": (
        lambda: suffix.SuffixDrafter(suffix.SuffixOptions(suffix_decoding_max_tree_depth=6)),
        lambda: suffix.SuffixDrafter(suffix.SuffixOptions(suffix_decoding_max_tree_depth=6), SuffixAutomaton),
    ),
}
some_tokens = st.lists(st.sampled_from([0, 1, 2, 5000, MOST_TOKEN]), max_size=40)
# Committed and drafted tokens of a sequence, and a limit.
parts = st.tuples(some_tokens, some_tokens, st.integers(0, 6))


@NATIVE
@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=examples(200))
@given(source=some_tokens, steps=st.lists(st.lists(parts, min_size=3, max_size=3), max_size=6))
def test_drafts_of_a_batch_are_those_of_the_reference_and_alone(
    name: str, source: list[int], steps: list[list[tuple[list[int], list[int], int]]]
) -> None:
    """Each sequence may have drafted tokens at its end."""
    with patch.object(suffix, "PART", 10**6):  # else sequences would learn from each other in another order
        drafters = [make() for make in (*PAIRS[name], PAIRS[name][0])]
        requests = [make_request([0], seq_id=number, source=tuple(source) if number else ()) for number in range(3)]
        for drafter, request in product(drafters, requests):
            drafter.begin(request)
        for step in steps:
            for request, (tokens, ahead, _) in zip(requests, step, strict=True):
                request.extend([*tokens, *ahead])
                request.num_drafted = len(ahead)
            limits = [limit for *_, limit in step]
            together = [drafter.propose(requests, limits) for drafter in drafters[:2]]
            alone = [drafters[2].propose([each], [limit])[0] for each, limit in zip(requests, limits, strict=True)]
            for native, reference, own in zip(*together, alone, strict=True):
                assert native.token_list == reference.token_list == own.token_list
                assert native.scores == reference.scores == own.scores
            for request, (_, ahead, _) in zip(requests, step, strict=True):
                request.shorten(len(request.tokens) - len(ahead))
                request.num_drafted = 0


@NATIVE
@pytest.mark.parametrize("name", PAIRS)
def test_native_readers_take_any_ids(name: str) -> None:
    drafter, text = PAIRS[name][0](), [-1, -(2**31), 2**40 - 1, -(2**62), 7, 8] * 3
    request = make_request(text)
    drafter.begin(request)
    assert len(copied(drafter, request)) == 3


@NATIVE
@pytest.mark.parametrize("name", PAIRS)
def test_an_unreadable_id_costs_no_neighbour_its_tokens(name: str) -> None:
    """The engine calls a drafter that failed for each sequence alone."""
    drafter, text = PAIRS[name][0](), make_request([1, 2, 3, 4, 1, 2])
    for request in (text, bad := make_request([2**70], seq_id=2)):
        drafter.begin(request)
    with pytest.raises(OverflowError):
        drafter.propose([text, bad], [2, 2])
    assert copied(drafter, text, 2) == [3, 4]
