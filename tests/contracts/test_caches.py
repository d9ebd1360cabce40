"""Every KV cache against a dictionary: what was written is read back, whatever happened in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.slotted import SlottedKVCache
from speculant.errors import CapacityError

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=3, dtype=torch.float64, device=torch.device("cpu"))
NUM_SEQS, MAX_LEN = 3, 11

# (shape, number of sequences, longest sequence) -> an empty cache with room for that many of that length
CACHES: dict[str, Callable[[CacheShape, int, int], KVCache]] = {
    "slotted": SlottedKVCache,
}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> KVCache:
    return CACHES[request.param](SHAPE, NUM_SEQS, MAX_LEN)


def contents(marks: list[float], layer: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [n, heads, dim] that say which mark, layer, head and dimension they belong to."""
    places = torch.arange(SHAPE.num_kv_heads * SHAPE.head_dim).view(1, SHAPE.num_kv_heads, SHAPE.head_dim)
    keys = torch.tensor(marks, dtype=SHAPE.dtype).view(-1, 1, 1) * 100 + places + 10 * layer
    return keys, -keys - 0.5


def feed(cache: KVCache, seq: int, marks: list[float]) -> None:
    """Reserve positions for marks and write them to every layer."""
    slots = cache.reserve(seq, len(marks))
    for layer in range(SHAPE.num_layers):
        cache.write(layer, slots.rows, *contents(marks, layer))


def assert_holds(cache: KVCache, seq: int, marks: list[float]) -> None:
    """Assert that a sequence reads back as exactly these marks."""
    assert cache.length(seq) == len(marks)
    for layer in range(SHAPE.num_layers):
        for read, expected in zip(cache.read(layer, seq), contents(marks, layer), strict=True):
            assert torch.equal(read, expected)


class CacheMachine(RuleBasedStateMachine):
    """Random use of one cache beside a dictionary of what each sequence must hold."""

    make: Callable[[CacheShape, int, int], KVCache]

    def __init__(self) -> None:
        super().__init__()
        self.cache = type(self).make(SHAPE, NUM_SEQS, MAX_LEN)
        self.capacity = self.cache.free_tokens()
        self.held: dict[int, list[float]] = {}
        self.last_mark = 0.0

    def _marks(self, n: int) -> list[float]:
        self.last_mark += n
        return [self.last_mark - n + 1 + i for i in range(n)]

    @rule(seq=st.integers(0, 4), n=st.integers(0, 6))
    def feed(self, seq: int, n: int) -> None:
        must_fit = len(self.held.get(seq, [])) + n <= MAX_LEN and 0 < n <= self.cache.free_tokens()
        marks = self._marks(n)
        try:
            feed(self.cache, seq, marks)
        except CapacityError:
            assert not must_fit, "refused although there was room"
            return
        self.held[seq] = self.held.get(seq, []) + marks
        assert len(self.held[seq]) <= MAX_LEN

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reserve_and_take_back(self, data: st.DataObject) -> None:
        """A pass that reserved, wrote garbage and failed leaves nothing behind."""
        seq = data.draw(st.sampled_from(sorted(self.held)))
        n = data.draw(st.integers(0, MAX_LEN - len(self.held[seq])))
        try:
            feed(self.cache, seq, [-1.0] * n)
        except CapacityError:
            return
        self.cache.truncate_to(seq, len(self.held[seq]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.held)))
        n = data.draw(st.integers(0, len(self.held[seq])))
        self.cache.truncate_to(seq, n)
        del self.held[seq][n:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep_path(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.held)))
        base = data.draw(st.integers(0, len(self.held[seq])))
        nodes = range(len(self.held[seq]) - base)
        path = [node for node in nodes if data.draw(st.booleans())]
        self.cache.keep_path(seq, base, path)
        self.held[seq] = self.held[seq][:base] + [self.held[seq][base + node] for node in path]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), dst=st.integers(0, 6))
    def fork(self, data: st.DataObject, dst: int) -> None:
        src = data.draw(st.sampled_from(sorted(self.held)))
        if self.held.get(dst):
            with pytest.raises(ValueError, match="fork"):
                self.cache.fork(src, dst)
            return
        if dst in self.held:
            return
        try:
            self.cache.fork(src, dst)
        except CapacityError:
            assert self.cache.free_tokens() < len(self.held[src]), "refused although there was room"
            return
        if self.held[src]:
            self.held[dst] = list(self.held[src])

    @rule(seq=st.integers(0, 6))
    def release(self, seq: int) -> None:
        self.cache.release(seq)
        self.held.pop(seq, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), beyond=st.integers(1, 3))
    def misuse(self, data: st.DataObject, beyond: int) -> None:
        """What makes no sense is refused and changes nothing."""
        seq = data.draw(st.sampled_from(sorted(self.held)))
        n = len(self.held[seq])
        with pytest.raises(ValueError, match="truncate_to"):
            self.cache.truncate_to(seq, n + beyond)
        with pytest.raises(ValueError, match="truncate_to"):
            self.cache.truncate_to(seq, -beyond)
        with pytest.raises(ValueError, match="keep_path|truncate_to"):
            self.cache.keep_path(seq, max(0, n - 1), [beyond])
        with pytest.raises(CapacityError, match="Fix"):
            self.cache.reserve(seq, MAX_LEN - n + beyond)

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        for seq in range(7):
            assert self.cache.length(seq) == len(self.held.get(seq, []))
        for seq, marks in self.held.items():
            if marks:
                assert_holds(self.cache, seq, marks)

    def teardown(self) -> None:
        for seq in list(self.held):
            self.cache.release(seq)
        self.cache.check()
        assert self.cache.free_tokens() == self.capacity, "a leak"


@pytest.mark.parametrize("name", CACHES)
def test_content_survives_any_use(name: str) -> None:
    machine: Any = type(f"{name.title()}Machine", (CacheMachine,), {"make": staticmethod(CACHES[name])})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25))


def test_slots_continue_where_the_sequence_ends(cache: KVCache) -> None:
    feed(cache, 7, [1.0, 2.0])
    slots = cache.reserve(7, 3)
    assert (slots.seq, slots.start, slots.end, len(slots.rows)) == (7, 2, 5, 3)
    assert cache.length(7) == 5


def test_rows_of_different_sequences_never_meet(cache: KVCache) -> None:
    rows = [row for seq in range(NUM_SEQS) for row in cache.reserve(seq, MAX_LEN).rows.tolist()]
    assert len(set(rows)) == NUM_SEQS * MAX_LEN


def test_every_promised_position_can_be_used(cache: KVCache) -> None:
    assert cache.free_tokens() >= NUM_SEQS * MAX_LEN
    for seq in range(NUM_SEQS):
        feed(cache, seq, [float(seq * 50 + i + 1) for i in range(MAX_LEN)])
    left = cache.free_tokens()
    with pytest.raises(CapacityError, match="Fix"):
        cache.reserve(NUM_SEQS, left + 1)
    assert cache.free_tokens() == left
    assert cache.length(NUM_SEQS) == 0
    cache.check()


def test_a_released_sequence_begins_anew(cache: KVCache) -> None:
    feed(cache, 1, [1.0, 2.0, 3.0])
    cache.release(1)
    assert cache.length(1) == 0
    feed(cache, 1, [9.0])
    assert_holds(cache, 1, [9.0])


def test_a_fork_is_independent_of_its_source(cache: KVCache) -> None:
    feed(cache, 1, [1.0, 2.0, 3.0])
    cache.fork(1, 2)
    cache.truncate_to(1, 1)
    feed(cache, 1, [8.0, 9.0])
    feed(cache, 2, [4.0])
    assert_holds(cache, 1, [1.0, 8.0, 9.0])
    assert_holds(cache, 2, [1.0, 2.0, 3.0, 4.0])
    cache.release(1)
    assert_holds(cache, 2, [1.0, 2.0, 3.0, 4.0])


def test_a_tree_is_compacted_to_its_accepted_path(cache: KVCache) -> None:
    feed(cache, 1, [1.0, 2.0])
    feed(cache, 1, [10.0, 11.0, 12.0, 13.0, 14.0])
    cache.keep_path(1, 2, (1, 3, 4))
    assert_holds(cache, 1, [1.0, 2.0, 11.0, 13.0, 14.0])


def test_a_path_beyond_the_draft_is_refused_and_moves_nothing(cache: KVCache) -> None:
    feed(cache, 1, [1.0, 2.0, 3.0, 4.0])
    for base, path in ((2, [1, 2]), (5, []), (1, [-1]), (2, [0, 1, 2])):
        with pytest.raises(ValueError, match="keep_path|truncate_to"):
            cache.keep_path(1, base, path)
        assert_holds(cache, 1, [1.0, 2.0, 3.0, 4.0])


def test_writing_one_sequence_leaves_its_neighbours_alone(cache: KVCache) -> None:
    for seq in (1, 2, 3):
        feed(cache, seq, [float(seq)] * MAX_LEN)
    cache.truncate_to(2, 0)
    feed(cache, 2, [99.0] * MAX_LEN)
    assert_holds(cache, 1, [1.0] * MAX_LEN)
    assert_holds(cache, 3, [3.0] * MAX_LEN)


def test_slotted_memory_that_does_not_fit_says_what_to_lower() -> None:
    huge = CacheShape(1000, 1000, 1000, torch.float64, torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"GiB.*\n.*max_num_seqs"):
        SlottedKVCache(huge, 1_000, 1_000_000)
