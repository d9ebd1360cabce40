"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from speculant.drafting import (
    LONGEST_SCORED,
    DrafterContext,
    LookupDrafter,
    LookupOptions,
    NgramDrafter,
    RecentMatches,
    SequenceReader,
    open_reader,
)
from speculant.drafting.lookup import ngram, prompt_lookup
from speculant.errors import ConfigError
from speculant.kernels import open_matches
from tests.examples import examples
from tests.fakes import drafter_context
from tests.models import make_request
from tests.small_models import NATIVE

Reader = Callable[[LookupOptions], SequenceReader]


def context(options: Mapping[str, Any]) -> DrafterContext:
    return drafter_context(100, options)


def search(tokens: list[int], options: LookupOptions, limit: int) -> list[int]:
    """Look for the longest match, the latest first, at every place; copy token by token."""
    end = len(tokens)
    for length in range(min(options.prompt_lookup_max, end), options.prompt_lookup_min - 1, -1):
        for place in range(end - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[end - length :]:
                text = list(tokens)
                for source in range(place, place + limit):
                    text.append(text[source])
                return text[end:]
    return []


@pytest.fixture(
    scope="module", params=[RecentMatches, pytest.param(open_reader, marks=NATIVE)], ids=["reference", "native"]
)
def reader(request: pytest.FixtureRequest) -> Reader:
    made: Reader = request.param
    return made


def drafted(matches: SequenceReader, limit: int) -> list[int]:
    return matches.draft(limit).token_list


@settings(max_examples=examples(1000))
@example(chunks=[[2, 1, 2, 0, 1, 2, 1, 2]], shortest=1, further=2, limit=1)
@given(
    chunks=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8),
    shortest=st.integers(1, 4),
    further=st.integers(0, 4),
    limit=st.integers(1, 6),
)
def test_lookup_equals_a_search(
    reader: Reader, chunks: list[list[int]], shortest: int, further: int, limit: int
) -> None:
    options = LookupOptions(shortest + further, shortest)
    matches, tokens = reader(options), list[int]()
    for chunk in chunks:
        matches.update(chunk)
        tokens += chunk
        assert drafted(matches, limit) == search(tokens, options, limit)
        assert matches.seen == len(tokens)


def test_lookup_takes_the_longest_match(reader: Reader) -> None:
    matches = reader(LookupOptions())
    matches.update([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert drafted(matches, 2) == [7, 9]  # behind 1 2 3, though 3 8 is later


def test_lookup_takes_the_latest_of_equal_matches(reader: Reader) -> None:
    matches = reader(LookupOptions())
    matches.update([5, 6, 1, 5, 6, 2, 0, 5, 6])
    assert drafted(matches, 1) == [2]


def test_lookup_goes_on_with_its_own_copy(reader: Reader) -> None:
    matches = reader(LookupOptions())
    matches.update([1, 2, 3, 1, 2, 3])
    assert drafted(matches, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_lookup_matches_keep_to_the_shortest_length(reader: Reader) -> None:
    matches = reader(LookupOptions(4, 2))
    matches.update([1, 2, 9, 2])
    assert drafted(matches, 3) == []
    matches.update([9, 2])
    assert drafted(matches, 2) == [9, 2]


def test_lookup_scores_grow_with_the_match(reader: Reader) -> None:
    scores = []
    for length in range(1, LONGEST_SCORED + 8):
        matches = reader(LookupOptions())
        matches.update([99, *range(length), 50, 98, *range(length)])
        tree = matches.draft(2)
        assert tree.token_list == [50, 98]
        assert tree.scores is not None
        scores.append(tree.scores[0])
        assert 0 < tree.scores[0] < tree.scores[1] < 1
    assert scores[:LONGEST_SCORED] == sorted(set(scores))
    assert set(scores[LONGEST_SCORED:]) == {scores[LONGEST_SCORED - 1]}


SLOW_TEXTS = [
    pytest.param(text, marks=pytest.mark.slow) for text in ([*range(2500)] * 8, [i * i % 1999 for i in range(20_000)])
]


@pytest.mark.parametrize("text", [list(range(20_000)), *SLOW_TEXTS])
def test_lookup_memory_is_bounded(text: list[int]) -> None:
    tracemalloc.start()
    matches = RecentMatches(LookupOptions())
    matches.update(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= 220 * len(text)
    assert sum(len(table) for _, table in matches._tables) <= len(text)


@NATIVE
@pytest.mark.parametrize(
    "text", [list(range(20_000)), [*range(2500)] * 8, [i * i % 1999 for i in range(20_000)], [0] * 20_000]
)
def test_native_lookup_takes_little_memory(text: list[int]) -> None:
    tables = open_matches(1, 8, LONGEST_SCORED)
    assert tables is not None
    for end in range(1, len(text), 1499):
        tables.look_up([(tables, text[max(0, end - 1499) : end], (), 0)])
        assert tables.num_bytes <= 30 * end + 400


@pytest.mark.parametrize("values", [{"prompt_lookup_min": 0}, {"prompt_lookup_max": 0}, {"prompt_lookup_min": 9}])
def test_impossible_lengths_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="Fix"):
        LookupOptions(**values)


@pytest.mark.parametrize(
    ("given_", "options"),
    [
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, LookupOptions(4, 2)),
        ({"prompt_lookup_max": 3}, LookupOptions(3, 3)),
        ({"prompt_lookup_min": 2}, LookupOptions(2, 2)),
    ],
)
def test_ngram_reads_the_keys_of_vllm(given_: dict[str, int], options: LookupOptions) -> None:
    """There the two lengths are the same where only one is named."""
    drafter = ngram.build(context(given_))
    assert isinstance(drafter, LookupDrafter)
    text = [1, 2, 3, 4, 5, 2, 6, 2, 3, 4]
    for length in range(1, len(text) + 1):
        request = make_request(text[:length], seq_id=length)
        drafter.begin(request)
        (tree,) = drafter.propose([request], [3])
        assert tree.token_list == search(text[:length], options, 3)


def test_ngram_has_tables_without_the_keys_of_vllm() -> None:
    assert isinstance(ngram.build(context({"max_order": 3})), NgramDrafter)
    assert isinstance(prompt_lookup.build(context({})), LookupDrafter)


@pytest.mark.parametrize("other", [{"max_order": 3}, {"prompt_lookup_mx": 3}])
def test_ngram_keys_of_both_kinds_are_refused(other: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        ngram.build(context({"prompt_lookup_min": 2, **other}))
