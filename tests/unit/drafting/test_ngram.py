"""N-gram tables against a literal reading of their description (docs/references.md, n-gram tables)."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculant.drafting.ngram import METHOD, Options, Predictor, context_hash
from speculant.errors import ConfigError


class LiteralPredictor:
    """The description as written: three tables, a window of 512 tokens, the longest known context first."""

    def __init__(self, max_history: int = 512) -> None:
        self.history: deque[int] = deque()
        self.max_history = max_history
        self.tables: list[dict[int, Counter[int]]] = [{}, {}, {}]  # tables[order - 2]

    def update(self, token: int) -> None:
        history = list(self.history)
        for order in (2, 3, 4):
            if len(history) >= order - 1:
                key = self.fnv1a(history[len(history) - (order - 1) :])
                self.tables[order - 2].setdefault(key, Counter())[token] += 1
        self.history.append(token)
        while len(self.history) > self.max_history:
            self.history.popleft()

    def predict(self, draft_count: int = 4) -> list[int]:
        context, drafts = list(self.history), []
        for _ in range(draft_count):
            found = None
            for order in (4, 3, 2):
                if len(context) < order - 1:
                    continue
                counts = self.tables[order - 2].get(self.fnv1a(context[len(context) - (order - 1) :]))
                if counts:
                    found = counts.most_common(1)[0][0]  # the first one counted, on a tie
                    break
            if found is None:
                break
            drafts.append(found)
            context.append(found)
        return drafts

    @staticmethod
    def fnv1a(tokens: list[int]) -> int:
        h = 14695981039346656037
        for token in tokens:
            h ^= token
            h = h * 1099511628211 % 2**64
        return h


@given(
    chunks=st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=6),
    limit=st.integers(0, 8),
    history=st.sampled_from([4, 6, 512]),
)
def test_it_predicts_what_the_description_says(chunks: list[list[int]], limit: int, history: int) -> None:
    ours, literal = Predictor(Options(history=history)), LiteralPredictor(history)
    for chunk in chunks:
        ours.update(chunk)
        for token in chunk:
            literal.update(token)
        assert ours.predict(limit) == literal.predict(limit)
    assert ours.seen == sum(map(len, chunks))


@given(
    kept=st.lists(st.integers(0, 3), max_size=12),
    dropped=st.lists(st.integers(0, 3), max_size=6),
    added=st.lists(st.integers(0, 3), max_size=6),
    history=st.sampled_from([4, 6, 512]),
)
def test_ngram_removal_undoes_an_update(kept: list[int], dropped: list[int], added: list[int], history: int) -> None:
    """Counts, the order of first appearance that decides ties, and the window."""
    rolled_back, fresh = Predictor(Options(history=history)), Predictor(Options(history=history))
    rolled_back.update([*kept, *dropped])
    rolled_back.remove(kept, dropped)
    fresh.update(kept)
    for predictor in (rolled_back, fresh):
        predictor.update(added)
    assert rolled_back.seen == fresh.seen
    assert _tables(rolled_back) == _tables(fresh)
    assert rolled_back.predict(6) == fresh.predict(6)


def _tables(predictor: Predictor) -> list[list[tuple[int, ...]]]:
    """Return the counts of each order as context, token, count, token, count, ..."""
    return [
        sorted((context, *(value for count in counts.items() for value in count)) for context, counts in table.items())
        for table in predictor._tables.values()
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)],
)
def test_contexts_are_hashed_by_fnv_1a(text: str, expected: int) -> None:
    """Known answers of the 64-bit hash; ids below 256 are its bytes."""
    assert context_hash(list(text.encode())) == expected


def test_the_whole_id_goes_into_the_hash() -> None:
    assert context_hash([1, 2]) != context_hash([2, 1])
    assert context_hash([1]) != context_hash([257])
    assert context_hash([128_000]) == LiteralPredictor.fnv1a([128_000])


def test_the_longest_context_wins_over_a_more_frequent_one() -> None:
    predictor = Predictor(Options())
    predictor.update([1, 2, 3, 9, 0, 3, 4, 0, 3, 4, 0, 3, 4, 0, 1, 2, 3])
    assert predictor.predict(1) == [9]  # 1 2 3 -> 9 once, though 3 -> 4 three times
    shorter = Predictor(Options(max_order=2))
    shorter.update([1, 2, 3, 9, 0, 3, 4, 0, 3, 4, 0, 3, 4, 0, 1, 2, 3])
    assert shorter.predict(1) == [4]


def test_predictions_chain_and_stop_at_an_unknown_context() -> None:
    predictor = Predictor(Options())
    predictor.update([5, 6, 7, 8, 5])
    assert predictor.predict(4) == [6, 7, 8, 5]
    predictor = Predictor(Options())
    predictor.update([1, 2, 3, 1])
    predictor.update([4, 2])
    assert predictor.predict(9) == [3, 1, 4, 2, 3, 1, 4, 2, 3]
    predictor.update([99])
    assert predictor.predict(4) == []


def test_the_most_frequent_wins_and_the_first_seen_on_a_tie() -> None:
    predictor = Predictor(Options(max_order=2))
    predictor.update([1, 7, 1, 8, 1, 8, 1])
    assert predictor.predict(1) == [8]
    predictor = Predictor(Options(max_order=2))
    predictor.update([1, 8, 1, 7, 1])
    assert predictor.predict(1) == [8]


def test_min_order_leaves_out_short_contexts() -> None:
    tokens = [1, 2, 3, 9, 2, 3]
    for min_order, expected in ((2, [9]), (3, [9]), (4, [])):
        predictor = Predictor(Options(min_order=min_order, max_order=4))
        predictor.update(tokens)
        assert predictor.predict(1) == expected


def test_the_tables_keep_what_left_the_window() -> None:
    predictor = Predictor(Options())
    filler = list(range(1000, 1600))
    predictor.update([1, 2, 3, 4, *filler, 1, 2, 3])
    assert predictor.predict(1) == [4]


def test_nothing_is_predicted_from_nothing() -> None:
    predictor = Predictor(Options())
    assert predictor.predict(4) == []
    predictor.update([1])
    assert predictor.predict(4) == []
    assert predictor.predict(0) == []


def test_the_seed_s_numbers_are_the_defaults() -> None:
    assert (Options().min_order, Options().max_order, Options().history) == (2, 4, 512)
    assert METHOD.default_length == 4


@pytest.mark.parametrize("values", [{"min_order": 1}, {"min_order": 5}, {"max_order": 1}, {"history": 3}])
def test_impossible_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Fix"):
        Options(**values)
