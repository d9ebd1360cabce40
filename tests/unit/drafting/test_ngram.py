"""N-gram tables against a literal reading of their description (docs/references.md, n-gram tables)."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speculant.cache.base import CacheShape
from speculant.cache.storage import paged_cache
from speculant.drafting.lookup.ngram import METHOD, NgramDrafter, NgramOptions, Predictor, context_hash
from speculant.drafting.lookup.reading import match_score
from speculant.errors import ConfigError
from speculant.models.base import SequenceInput, build_batch
from speculant.sampling.chance import KeyedChances
from speculant.types import DraftTree, Verdict
from speculant.verification.match import Match
from tests.models import make_request


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
def test_it_predicts_as_described(chunks: list[list[int]], limit: int, history: int) -> None:
    ours, literal = Predictor(NgramOptions(history=history)), LiteralPredictor(history)
    for chunk in chunks:
        ours.update(chunk)
        for token in chunk:
            literal.update(token)
        assert ours.predict(limit) == literal.predict(limit)
    assert ours.seen == sum(map(len, chunks))


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
    predictor = Predictor(NgramOptions())
    predictor.update([1, 2, 3, 9, 0, 3, 4, 0, 3, 4, 0, 3, 4, 0, 1, 2, 3])
    assert predictor.predict(1) == [9]  # 1 2 3 -> 9 once, though 3 -> 4 three times
    shorter = Predictor(NgramOptions(max_order=2))
    shorter.update([1, 2, 3, 9, 0, 3, 4, 0, 3, 4, 0, 3, 4, 0, 1, 2, 3])
    assert shorter.predict(1) == [4]


def test_predictions_chain_and_stop_at_an_unknown_context() -> None:
    predictor = Predictor(NgramOptions())
    predictor.update([5, 6, 7, 8, 5])
    assert predictor.predict(4) == [6, 7, 8, 5]
    predictor = Predictor(NgramOptions())
    predictor.update([1, 2, 3, 1])
    predictor.update([4, 2])
    assert predictor.predict(9) == [3, 1, 4, 2, 3, 1, 4, 2, 3]
    predictor.update([99])
    assert predictor.predict(4) == []


def test_the_most_frequent_wins_and_the_first_seen_on_a_tie() -> None:
    predictor = Predictor(NgramOptions(max_order=2))
    predictor.update([1, 7, 1, 8, 1, 8, 1])
    assert predictor.predict(1) == [8]
    predictor = Predictor(NgramOptions(max_order=2))
    predictor.update([1, 8, 1, 7, 1])
    assert predictor.predict(1) == [8]


def test_min_order_leaves_out_short_contexts() -> None:
    tokens = [1, 2, 3, 9, 2, 3]
    for min_order, expected in ((2, [9]), (3, [9]), (4, [])):
        predictor = Predictor(NgramOptions(min_order=min_order, max_order=4))
        predictor.update(tokens)
        assert predictor.predict(1) == expected


def test_the_tables_keep_tokens_that_left_the_window() -> None:
    predictor = Predictor(NgramOptions())
    filler = list(range(1000, 1600))
    predictor.update([1, 2, 3, 4, *filler, 1, 2, 3])
    assert predictor.predict(1) == [4]


def test_nothing_is_predicted_from_nothing() -> None:
    predictor = Predictor(NgramOptions())
    assert predictor.predict(4) == []
    predictor.update([1])
    assert predictor.predict(4) == []
    assert predictor.predict(0) == []


def test_the_seed_s_numbers_are_the_defaults() -> None:
    assert (NgramOptions().min_order, NgramOptions().max_order, NgramOptions().history) == (2, 4, 512)
    assert METHOD.default_length == 4


@pytest.mark.parametrize("values", [{"min_order": 1}, {"min_order": 5}, {"max_order": 1}, {"history": 3}])
def test_impossible_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Fix"):
        NgramOptions(**values)


# The worked examples of docs/references.md, n-gram tables.
THE, CAT, SAT, ON, DOWN, AND, MAT, STOP = range(8)


def example(*counted: tuple[list[int], int, int]) -> Predictor:
    """Return a predictor whose tables have counts of (context, token, count), at the end of "the cat sat"."""
    predictor = Predictor(NgramOptions())
    predictor.update([THE, CAT, SAT])
    for context, token, count in counted:
        table = predictor._tables[len(context) - 1]
        for _ in range(count):
            table.add(context_hash(context), token, predictor.seen)
    return predictor


def test_ngram_tables_count_each_order() -> None:
    """One token is counted after one, two and three tokens of context."""
    predictor = Predictor(NgramOptions())
    predictor.update([THE, CAT, SAT, ON])
    for context in ([SAT], [CAT, SAT], [THE, CAT, SAT]):
        assert predictor.count(context, ON) == 1
        assert predictor.count(context, DOWN) == 0
    predictor.update([THE, CAT, SAT, ON, CAT, SAT, DOWN])
    assert [predictor.count([THE, CAT, SAT][start:], ON) for start in (2, 1, 0)] == [2, 2, 2]
    assert [predictor.count([THE, CAT, SAT][start:], DOWN) for start in (2, 1, 0)] == [1, 1, 0]


def test_ngram_table_of_the_example() -> None:
    context = [THE, CAT, SAT]
    predictor = example((context, ON, 47), (context, DOWN, 3), (context, AND, 1))
    assert [predictor.count(context, token) for token in (ON, DOWN, AND)] == [47, 3, 1]
    tree = predictor.draft(1)
    assert tree.token_list == [ON]
    assert tree.scores == pytest.approx([47 / 51 * match_score(3)])


def test_ngram_chain_and_back_off_of_the_example() -> None:
    """Three tokens by their three predecessors; nothing followed "on the mat", and something followed "the mat"."""
    predictor = example(
        ([THE, CAT, SAT], ON, 47), ([CAT, SAT, ON], THE, 31), ([SAT, ON, THE], MAT, 23), ([THE, MAT], STOP, 5)
    )  # fmt: skip
    tree = predictor.draft(4)
    assert tree.token_list == [ON, THE, MAT, STOP]
    assert tree.scores == pytest.approx([match_score(3)] * 3 + [match_score(2)])


def test_ngram_backs_off_to_one_token_and_then_stops() -> None:
    predictor = example(([SAT], DOWN, 2))
    assert predictor.predict(4) == [DOWN]


def test_ngram_score_is_the_share_of_the_context() -> None:
    predictor = Predictor(NgramOptions())
    predictor.update([1, 2, 0, 1, 3, 0, 1, 2, 4, 1])
    tree = predictor.draft(1)
    assert tree.token_list == [2]
    assert tree.scores == pytest.approx([2 / 3 * match_score(1)])


def test_ngram_draft_is_packed_after_its_token() -> None:
    """The known token and four drafts are five rows; three drafts stand, so that one pass gives four tokens."""
    known, quick, brown, fox, jumps, jumped, over = range(50, 57)
    cache = paged_cache(CacheShape(1, 1, 2, torch.float32, torch.device("cpu")), 16, 4)
    predictor = Predictor(NgramOptions())
    predictor.update([known, quick, brown, fox, jumps, *range(36), known])
    tree = predictor.draft(4)
    cache.reserve(1, 42)
    batch = build_batch([SequenceInput(1, [known], tree)], cache, torch.device("cpu"))
    assert batch.tokens.tolist() == [known, quick, brown, fox, jumps]
    assert batch.positions.tolist() == [42, 43, 44, 45, 46]
    p = torch.eye(64, dtype=torch.float64)[[quick, brown, fox, jumped, over]]
    chance = KeyedChances().verify(make_request([known]))
    assert Match().verify(tree, p, chance) == Verdict((0, 1, 2), jumped)
    cache.compact(1, 43, [0, 1, 2])
    assert cache.length(1) == 42 + 4, "pos + keep"


def test_ngram_window_bounds_contexts_and_not_counts() -> None:
    """The last 512 tokens are all that contexts can be of; three of them ever are."""
    predictor = Predictor(NgramOptions(history=512))
    predictor.update([1, 2, 3, 4])
    predictor.update(range(1000, 1600))
    assert predictor.count([1, 2, 3], 4) == 1
    assert len(predictor._history) == 3


@given(tokens=st.lists(st.integers(0, 3), max_size=40))
def test_ngram_ties_go_to_the_first_seen(tokens: list[int]) -> None:
    predictor, counts = Predictor(NgramOptions(max_order=2)), dict[int, dict[int, int]]()
    for before, token in pairwise(tokens):
        behind = counts.setdefault(before, {})
        behind[token] = behind.get(token, 0) + 1
    predictor.update(tokens)
    known = counts.get(tokens[-1], {}) if tokens else {}
    assert predictor.predict(1) == ([max(known, key=known.__getitem__)] if known else [])


def test_ngram_reads_what_it_has_not_seen_when_it_drafts() -> None:
    drafter, request = NgramDrafter(NgramOptions()), make_request([5, 6, 7, 5])
    drafter.begin(request)
    assert drafter._readers[request.seq_id].seen == 0
    (tree,) = drafter.propose([request], [2])
    assert tree.token_list == [6, 7]
    assert drafter._readers[request.seq_id].seen == 4
    assert drafter.propose([request], [0]) == [DraftTree.empty()]
