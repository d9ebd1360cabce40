"""Records of states: whatever is drafted, dropped, failed and found again, a pass reads the state of its text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from speculant.cache import (
    MOST_PENDING,
    NO_RECORD,
    RECORDS_OF_SEQUENCE,
    CacheShape,
    KVCache,
    LayerShape,
    StateRows,
    StateShape,
    paged_cache,
)
from speculant.errors import CapacityError

SHAPE = CacheShape(
    2, 1, 2, torch.float32, torch.device("cpu"), (), (LayerShape(1, 2), LayerShape(0, 0)),
    states=(None, StateShape(4, 3, 2, 3)),
)  # fmt: skip
SIZE = 4


@dataclass
class Records:
    """The records of a layer whose state is the text itself: the tokens of states, and of updates by place."""

    states: dict[int, list[int]] = field(default_factory=dict)
    updates: dict[int, dict[int, int]] = field(default_factory=dict)

    def run(self, rows: StateRows, start: int, text: Sequence[int], new: Sequence[int]) -> None:
        """Add rows to a text of `start` tokens; assert that they read its state."""
        state = [] if rows.read == NO_RECORD else list(self.states[rows.read])
        assert state == list(text[: rows.settled])
        own, end = self.updates.get(rows.read, {}), start + rows.certain
        seen = [*state, *(own[at % MOST_PENDING] for at in range(rows.settled, start))]
        assert seen == list(text[:start])
        every = [*seen, *new]
        to = rows.read if rows.write == NO_RECORD else rows.write
        if rows.write != NO_RECORD:
            self.states[to], self.updates[to] = every[:end], {}
        if rows.save != NO_RECORD:
            assert rows.settled <= rows.saved <= end
            self.states[rows.save], self.updates[rows.save] = every[: rows.saved], {}
        self.updates[to] |= {at % MOST_PENDING: every[at] for at in range(end, len(every))}


class Texts:
    """A model of two such layers. Drafts in the target's cache are made by the first one alone."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.layers = (Records(), Records())

    def run(self, seq_id: int, tokens: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> StateRows:
        """Run a pass over a text's next tokens and a draft; assert that it reads the state of the earlier tokens."""
        start = self.cache.reserve(seq_id, len(tokens) + len(drafted)).start
        rows = self.cache.advance(seq_id, start, len(tokens))
        for layer in self.layers:
            layer.run(rows, start, text, [*tokens, *drafted])
        return rows

    def draft(self, seq_id: int, text: Sequence[int], counts: Sequence[int]) -> None:
        """Draft after a text with the first layer alone, `counts[i]` tokens in pass i, and drop the drafts."""
        length, text = self.cache.length(seq_id), list(text)
        for count in counts:
            start = self.cache.reserve(seq_id, count).start
            self.layers[0].run(self.cache.advance(seq_id, start, 0), start, text[:start], [8] * count)
            text[start:] = [8] * count
        self.cache.truncate_to(seq_id, length)
        assert self.cache.length(seq_id) == length


def make(records: tuple[int, int] = (9, 2), blocks: int = 60) -> Texts:
    return Texts(paged_cache(SHAPE, blocks, SIZE, records=records))


def step(texts: Texts, seq_id: int, text: list[int], accepted: int, drafted: int, vocabulary: int = 3) -> None:
    """Compute a text's missing tokens and a draft that is right in part; append the right tokens and one more."""
    start = texts.cache.length(seq_id)
    new = [random.randrange(vocabulary) for _ in range(accepted + 1)]
    wrong = [vocabulary + 1] * (drafted - accepted)
    texts.run(seq_id, text[start:], [*new[:-1], *wrong], text)
    texts.cache.compact(seq_id, len(text), range(accepted))
    text += new
    texts.cache.insert_prefix(seq_id, text)


SCHEDULES = 40  # of one test
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 250))]


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_read_the_state_of_their_text(seed: int) -> None:
    for schedule in range(SCHEDULES):
        random.seed(SCHEDULES * seed + schedule)
        _run_schedule()


def _run_schedule() -> None:
    most, saved = random.randint(2, 4), random.randint(0, 6)
    records = (RECORDS_OF_SEQUENCE * (most + 1) + saved, min(saved, most))
    texts, running = make(records, random.choice([12, 60])), dict[int, list[int]]()
    cache = texts.cache
    for new in range(1, 60):
        do = random.random()
        if not running or (do < 0.15 and len(running) < most):
            text = [random.randrange(3) for _ in range(random.randint(1, 14))]
            if running and random.random() < 0.5:
                text = [*random.choice([*running.values()])[: random.randint(1, 30)], *text]
            running[new] = text
            assert cache.match_prefix(new, text) < len(text)
        elif do < 0.2 and len(running) < most:
            running[new] = _copy(cache, random.choice([*running.items()]), new)
        elif do < 0.25:
            cache.release(running.popitem()[0] if random.random() < 0.5 else min(running))
            running = {
                seq_id: text for seq_id, text in running.items() if cache.length(seq_id) or seq_id in cache._held
            }
        elif do < 0.3:  # it is preempted
            seq_id, text = random.choice([*running.items()])
            cache.release(seq_id)
            assert cache.match_prefix(seq_id, text) < len(text)
        else:
            seq_id, text = random.choice([*running.items()])
            try:
                _pass(texts, seq_id, text)
            except CapacityError:
                cache.release(seq_id)
                del running[seq_id]
        cache.check()
    for seq_id in running:
        cache.release(seq_id)
    assert cache.forget_prefixes()
    cache.check()


def _copy(cache: KVCache, source: tuple[int, list[int]], new: int) -> list[int]:
    """Let a new sequence begin with what another one holds, or with a part of it; return its text."""
    cache.fork(source[0], new)
    cache.truncate_to(new, random.randint(0, cache.length(new)))
    own = source[1][: cache.length(new)]
    return (
        [*source[1]] if random.random() < 0.5 else [*own, *(random.randrange(3) for _ in range(random.randint(1, 6)))]
    )


def _pass(texts: Texts, seq_id: int, text: list[int]) -> None:
    """Run a part of a prompt, a pass that fails, or a step, whose draft may be made in the same cache; or go back."""
    cache, start = texts.cache, texts.cache.length(seq_id)
    missing, do = len(text) - start, random.random()
    drafted = random.randint(0, MOST_PENDING - 1)
    if missing > 1 and do < 0.4:
        texts.run(seq_id, text[start : start + random.randint(1, missing - 1)], (), text)
        cache.insert_prefix(seq_id, text)
    elif do < 0.6:
        texts.run(seq_id, text[start:], [9] * drafted, text)
        cache.truncate_to(seq_id, start)
        assert cache.length(seq_id) == start
    elif do < 0.63:
        cache.truncate_to(seq_id, random.randint(0, start))
    else:
        if random.random() < 0.4:
            size = random.randint(1, MOST_PENDING)
            parts = random.choice([[size], [1] * size, [1, size - 1]] if size > 1 else [[1]])
            texts.draft(seq_id, text, parts)
        step(texts, seq_id, text, random.randint(0, drafted), drafted)


def test_two_records_take_turns() -> None:
    texts, text = make((4, 0)), [1, 2, 3, 4, 5]
    seen = []
    for _ in range(4):
        step(texts, 1, text, accepted=1, drafted=3)
        seen.append(texts.cache._held[1].record)
    assert len({each.number for each in seen if each}) == 2


def test_drafts_of_a_draft_model_leave_the_state() -> None:
    texts, text = make(), [1, 2, 3]
    texts.run(1, text, (), text)
    for token in (4, 5, 6):
        rows = texts.cache.advance(1, texts.cache.reserve(1, 1).start, 0)
        assert (rows.write, rows.settled, rows.certain) == (NO_RECORD, 3, 0), token


def test_a_lost_state_is_computed_again_from_a_known_one() -> None:
    texts, text = make(), list(range(11))
    texts.run(1, text[:9], (), text)
    texts.cache.insert_prefix(1, text[:9])
    texts.run(1, text[9:], (), text)
    assert [at for at in range(1, 12) if texts.cache.holds_window(1, at)] == [9, 11]
    texts.cache.truncate_to(1, 8)
    assert texts.cache.length(1) == 8
    texts.cache.truncate_to(1, 7)
    assert texts.cache.length(1) == 0
    texts.cache.check()


def test_a_text_finds_the_nearest_known_state() -> None:
    texts, text = make(), list(range(30))
    for end in (10, 21):
        texts.run(1, text[texts.cache.length(1) : end], (), text)
        texts.cache.insert_prefix(1, text[:end])
    found = {length: texts.cache.match_prefix(100 + length, text[:length]) for length in (30, 21, 20, 15, 8, 3)}
    assert found == {30: 20, 21: 20, 20: 8, 15: 8, 8: 0, 3: 0}
    texts.cache.check()


def test_texts_with_the_same_beginning_find_its_state() -> None:
    """The second one computes it, and keeps the state where the texts part."""
    texts, same = make((30, 2)), [*range(18)]
    for place, found in enumerate((0, 0, 16, 16)):
        text = [*same, 20 + place, *range(30, 39)]
        assert texts.cache.match_prefix(place, text) == found
        while (start := texts.cache.length(place)) < len(text):
            texts.run(place, text[start : sum(texts.cache.next_part(place, len(text)))], (), text)
        texts.cache.insert_prefix(place, text)
        assert texts.cache.match_prefix(100 + place, text) == 24
        texts.cache.check()


def test_a_decoding_text_keeps_its_newest_state_alone() -> None:
    texts, text = make((40, 4)), [1, 2, 3, 4, 5]
    for _ in range(30):
        step(texts, 1, text, accepted=0, drafted=0)
    assert texts.cache.records is not None
    assert len(texts.cache.records.index.nodes) == 2  # the prompt's, and the newest


def test_a_decoding_text_leaves_the_states_of_others() -> None:
    """Its last state was evicted, and another prompt's has its record."""
    texts, text, other = make((6, 1)), [1, 2, 3, 4, 5], [*range(10, 20)]
    step(texts, 1, text, accepted=3, drafted=3)
    step(texts, 1, text, accepted=0, drafted=3)
    records = texts.cache.records
    assert records is not None
    records.drop_kept()
    texts.run(2, other, (), other)
    texts.cache.insert_prefix(2, other)
    texts.cache.release(2)
    for _ in range(3):
        step(texts, 1, text, accepted=2, drafted=3)
    assert texts.cache.match_prefix(3, other) == 8


def test_a_text_that_begins_again_has_no_last_state() -> None:
    texts, text = make(), [1, 2, 3, 4, 5]
    for _ in range(6):
        step(texts, 1, text, accepted=1, drafted=2)
    texts.cache.truncate_to(1, 0)
    for at, token in enumerate(text):
        texts.run(1, [token], (), text)
        assert texts.cache.length(1) == at + 1
    texts.cache.insert_prefix(1, text)
    texts.cache.check()


def test_too_many_drafted_rows_are_refused() -> None:
    texts = make()
    texts.cache.reserve(1, MOST_PENDING + 2)
    with pytest.raises(ValueError, match="rows wait for the state"):
        texts.cache.advance(1, 0, 1)


def test_a_state_takes_no_trees() -> None:
    texts, text = make(), [1, 2]
    texts.run(1, text, [3, 4], text)
    with pytest.raises(ValueError, match="takes chains alone"):
        texts.cache.compact(1, 2, [1])
