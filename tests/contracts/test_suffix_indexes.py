"""Suffix indexes, native and reference, against a reading of every occurrence in the texts."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from speculant.kernels import Continuation, SuffixAutomaton, SuffixIndex, SuffixSettings, open_native, open_suffix_index
from tests.examples import examples

OpenIndex = Callable[[SuffixSettings], SuffixIndex]
PLAIN = SuffixSettings()
BUILT = open_native(PLAIN) is not None
NATIVE_BYTES, REFERENCE_BYTES = 190, 580  # per token, at most (drafting/lookup/suffix.py)


def native(settings: SuffixSettings) -> SuffixIndex:
    made = open_native(settings)
    assert made is not None
    return made


@pytest.fixture(
    scope="module",
    params=[
        SuffixAutomaton,
        pytest.param(native, marks=pytest.mark.skipif(not BUILT, reason="the native library is not built")),
    ],
    ids=["reference", "native"],
)
def open_index(request: pytest.FixtureRequest) -> OpenIndex:
    made: OpenIndex = request.param
    return made


class ReadThrough:
    """The definition: the texts as they are, read from begin to end for each question."""

    def __init__(self, settings: SuffixSettings) -> None:
        self.settings = settings
        self.texts: list[list[int]] = [[]]

    def begin(self) -> None:
        self.texts.append([])

    def extend(self, tokens: Sequence[int]) -> None:
        self.texts[-1] += tokens

    def followers(self, string: Sequence[int]) -> list[int]:
        """Return what followed a string, in the order in which it was counted."""
        n = len(string)
        return [text[i] for text in self.texts for i in range(n, len(text)) if text[i - n : i] == string]

    def follow(self, match: list[int], most: int) -> Continuation:
        tokens, ratios, product = list[int](), list[float](), 1.0
        while len(tokens) < most and (found := self.followers([*match, *tokens])):
            best = max(found, key=lambda token: (found.count(token), len(found) - found[::-1].index(token)))
            ratio = found.count(best) / len(found)
            product *= ratio
            if product < self.settings.min_prob:
                break
            tokens.append(best)
            ratios.append(ratio)
        return Continuation(tokens, ratios, len(match))

    def continuation(self, context: Sequence[int], limit: int) -> Continuation:
        best, depth = Continuation([], [], 0), self.settings.depth
        for length in range(min(depth - 1, len(context)), 0, -1):
            most = min(limit, int(self.settings.factor * length), depth - length)
            found = self.follow(list(context[-length:]), most)
            if found.score > best.score:
                best = found
        return best


with_examples = hypothesis_settings(max_examples=examples(400))
texts = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=6)
every_setting = st.builds(
    SuffixSettings,
    st.sampled_from([2, 3, 5, 24]),
    st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    st.sampled_from([0, 0.1, 0.5]),
)


@with_examples
@given(settings=every_setting, texts=texts, begins=st.integers(0, 63), other=st.lists(st.integers(0, 3), max_size=6))
def test_a_continuation_counts_all_occurrences(
    open_index: OpenIndex, settings: SuffixSettings, texts: list[list[int]], begins: int, other: list[int]
) -> None:
    index, expected = open_index(settings), ReadThrough(settings)
    for number, text in enumerate(texts):
        if begins >> number & 1:
            index.begin()
            expected.begin()
        index.extend(text)
        expected.extend(text)
        for context in (expected.texts[-1], other):
            for limit in (0, 1, 4):
                found, wanted = index.continuation(context, limit), expected.continuation(context, limit)
                assert (found.tokens, found.ratios) == (wanted.tokens, wanted.ratios)
                assert (found.length >= wanted.length) if wanted.tokens else (found.length == 0)


@pytest.mark.skipif(not BUILT, reason="the native library is not built")
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 50_000])
def test_native_and_reference_are_equal_at_length(vocab_size: int) -> None:
    draw = random.Random(vocab_size)
    reference, other = SuffixAutomaton(PLAIN), native(PLAIN)
    text: list[int] = []
    for _ in range(300):
        piece = [draw.randrange(vocab_size) for _ in range(draw.randrange(9))] or text[: draw.randrange(1, 30)]
        if draw.random() < 0.05:
            text = []
            reference.begin()
            other.begin()
        text += piece
        reference.extend(piece)
        other.extend(piece)
        assert reference.continuation(text, 8) == other.continuation(text, 8)


def test_the_longest_suffix_wins_a_tie(open_index: OpenIndex) -> None:
    index = open_index(PLAIN)
    index.extend([1, 2, 9, 5, 2, 9, 0])
    assert index.continuation([1, 2], 1) == Continuation([9], [1.0], 2)


def test_match_and_draft_together_have_depth_tokens(open_index: OpenIndex) -> None:
    text = list(range(40))
    for depth, length, expected in ((24, 3, 3), (24, 12, 12), (6, 30, 3), (8, 30, 4), (2, 9, 1)):
        index = open_index(SuffixSettings(depth))
        index.extend(text)
        assert index.continuation(text[:length], 99).tokens == text[length : length + expected]


def test_an_occurrence_at_the_end_is_not_counted(open_index: OpenIndex) -> None:
    index = open_index(PLAIN)
    index.extend([1, 2, 3, 1])
    assert index.continuation([1], 1).ratios == [1.0]
    index.extend([4, 1])
    assert index.continuation([1], 1) == Continuation([4], [0.5], 1)


def test_texts_do_not_run_into_one_another(open_index: OpenIndex) -> None:
    index = open_index(PLAIN)
    index.extend([1, 2])
    index.begin()
    index.extend([3, 4])
    assert index.continuation([2], 4).tokens == []
    assert index.continuation([3], 4).tokens == [4]


def long_texts() -> dict[str, list[int]]:
    draw = random.Random(0)
    return {
        "random": [draw.randrange(100_000) for _ in range(6000)],
        "binary": [draw.randrange(2) for _ in range(6000)],
        "same": [1] * 6000,
        "worst": [*([1] * 3000), *([2] * 2999), 3],
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", long_texts())
@pytest.mark.parametrize("part", [0.1, 0.37, 0.71, 1.0])
def test_memory_per_token_is_bounded(open_index: OpenIndex, kind: str, part: float) -> None:
    """Right before and right after its arrays have grown."""
    text = long_texts()[kind]
    text = text[: int(part * len(text))]
    index, empty = open_index(PLAIN), open_index(PLAIN).num_bytes
    index.extend(text)
    bound = NATIVE_BYTES if open_index is native else REFERENCE_BYTES
    assert empty <= 1000
    assert len(text) < index.num_bytes - empty <= bound * len(text)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "random" else pytest.mark.slow) for kind in long_texts()]
)
def test_the_reference_takes_the_memory_that_it_reports(kind: str) -> None:
    text = long_texts()[kind]
    for length in (700, 2500, 6000):
        tracemalloc.start()
        index = SuffixAutomaton(PLAIN)
        index.extend(text[:length])
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken <= index.num_bytes + 4000


@pytest.mark.slow
def test_the_reference_serves_without_the_library() -> None:
    code = (
        "from speculant.kernels import native\n"
        "native.library_path = lambda: None\n"
        "from speculant.kernels.suffix_index import open_suffix_index\n"
        "from speculant.kernels.suffix_index import SuffixSettings\n"
        "index = open_suffix_index(SuffixSettings())\n"
        "index.extend([1, 2, 3, 1])\n"
        "print(type(index).__name__, index.continuation([1], 2).tokens)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["SuffixAutomaton", "[2]\n"]


@pytest.mark.skipif(not BUILT, reason="the native library is not built")
def test_the_library_is_used_where_it_is_built() -> None:
    assert type(open_suffix_index(PLAIN)) is type(native(PLAIN))
