"""Every KV cache against a dictionary: reads return the written content after any use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from speculant.cache import BlockPool, CacheShape, KVCache, ReservationPlan, paged_cache, slotted_cache
from speculant.errors import CapacityError
from tests.blocks import table_of
from tests.caches import SHAPE, assert_holds, feed, seen_from
from tests.examples import examples

NUM_SEQS, MAX_LEN, BLOCK = 3, 11, 4
NUM_NAMES = 7  # sequences that the machine may hold, more than there are slots
SALTS = ["", "tenant"]


# (shape, number of sequences, longest sequence) -> an empty cache with room for that many of that length
def paged(shape: CacheShape, num_seqs: int, max_len: int) -> KVCache:
    return paged_cache(shape, num_seqs * -(-max_len // BLOCK), BLOCK)


CACHES: dict[str, Callable[[CacheShape, int, int], KVCache]] = {"slotted": slotted_cache, "paged": paged}
# The windows of the two layers, the longest first.
WINDOWS: dict[str, tuple[int | None, int | None]] = {
    **{f"full and {window}": (None, window) for window in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * MAX_LEN)},
    **{f"{window} and {window}": (window, window) for window in (1, BLOCK, BLOCK + 1)},
    "6 and 2": (6, 2),
}
for name, windows in WINDOWS.items():
    CACHES[name] = lambda shape, *sizes, windows=windows: paged(replace(shape, windows=windows), *sizes)  # type: ignore[misc]
QUICK = ("slotted", "paged", "4 and 4", "6 and 2")
SHARING = {"paged", *WINDOWS}  # those that find prefixes again, in full blocks


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> KVCache:
    return CACHES[request.param](SHAPE, NUM_SEQS, MAX_LEN)


def full(n: int) -> int:
    """Return how many of n positions lie in full blocks."""
    return n // BLOCK * BLOCK


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


class CacheMachine(RuleBasedStateMachine):
    """Random use of one cache beside dictionaries of what each sequence must hold, and may have adopted.

    What a position holds is its token. Tokens are new ones, or replay what other sequences went on with,
    so that two sequences come to hold the same by adopting it, by a fork or each on its own.
    """

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.cache = CACHES[self.name](SHAPE, NUM_SEQS, MAX_LEN)
        self.capacity = self.cache.free_tokens()
        self.held: dict[int, list[int]] = {}
        self.cache_salt: dict[int, str] = {}
        self.indexed: dict[int, int] = {}  # positions of a sequence that others must be able to adopt
        self.windows = WINDOWS.get(self.name, (None, None))
        self.gone: dict[int, list[int]] = {}  # how many first blocks a sequence has given back, by layer
        self.past: list[tuple[int, ...]] = []
        self.known: set[tuple[str, tuple[int, ...]]] = set()  # whatever could ever be adopted
        self.last_token = 0

    def _new(self, n: int) -> list[int]:
        self.last_token += n
        return list(range(self.last_token - n + 1, self.last_token + 1))

    def _next(self, seq_id: int, n: int, replay: bool) -> list[int]:
        held = tuple(self.held.get(seq_id, ()))
        known = [past[len(held) :] for past in self.past if replay and past[: len(held)] == held]
        return next((list(past[:n]) for past in known if len(past) >= n), None) or self._new(n)

    def _feed(self, seq_id: int, tokens: list[int]) -> None:
        feed(self.cache, seq_id, tokens)
        self._hold(
            seq_id, self.held.get(seq_id, []) + tokens, self.cache_salt.get(seq_id, ""), self.indexed.get(seq_id, 0)
        )

    def _hold(self, seq_id: int, tokens: list[int], cache_salt: str, indexed: int) -> None:
        self.held[seq_id], self.cache_salt[seq_id], self.indexed[seq_id] = tokens, cache_salt, indexed
        if not tokens or seq_id not in self.gone:
            self.gone[seq_id] = [0] * len(self.windows)

    def _keep(self, seq_id: int, tokens: list[int], unchanged: int) -> None:
        self._hold(seq_id, tokens, self.cache_salt[seq_id], min(self.indexed[seq_id], full(unchanged)))

    def _unseen(self, n: int) -> list[int]:
        """Return how many first blocks a row at position n does not see, by layer."""
        return [seen_from(window, n) // BLOCK for window in self.windows]

    def _holds_window(self, seq_id: int, n: int) -> bool:
        return n == 0 or all(gone <= unseen for gone, unseen in zip(self.gone[seq_id], self._unseen(n), strict=True))

    def _draw_held(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    def _unknown(self) -> list[int]:
        return [seq_id for seq_id in range(NUM_NAMES) if seq_id not in self.held]

    @initialize(n=st.integers(0, MAX_LEN))
    def serve_one(self, n: int) -> None:
        self._feed(0, self._new(n))
        self._index(0, list(self.held[0]))

    @rule(seq_id=st.integers(0, 4), n=st.integers(0, 9), replay=st.booleans())
    def feed(self, seq_id: int, n: int, replay: bool) -> None:
        """Every promised slot is granted; only a copy of a shared block may be needed first."""
        length, room = self.cache.length(seq_id), ReservationPlan(self.cache).room(seq_id)
        assert room >= min(MAX_LEN - length, self.cache.free_tokens() - (BLOCK if length else 0))
        if n <= room:
            self._feed(seq_id, self._next(seq_id, n, replay))
        else:
            self._refuse(seq_id, n)

    @rule(data=st.data(), seq_ids=st.lists(st.integers(0, 4), min_size=1, max_size=4), replay=st.booleans())
    def feed_by_plan(self, data: st.DataObject, seq_ids: list[int], replay: bool) -> None:
        """Everything that a plan has room for is granted, in any order; a refused request takes no block."""
        plan, taken = ReservationPlan(self.cache), dict.fromkeys(seq_ids, 0)
        for seq_id in seq_ids:
            before = [plan.room(each) for each in range(NUM_NAMES)]
            n = data.draw(st.integers(0, before[seq_id] + BLOCK))
            if plan.take(seq_id, n):
                taken[seq_id] += n
            else:
                assert n > before[seq_id]
                assert before == [plan.room(each) for each in range(NUM_NAMES)]
        left = [plan.room(seq_id) for seq_id in range(NUM_NAMES)]
        for seq_id in data.draw(st.permutations(list(taken))):
            if taken[seq_id]:
                self._feed(seq_id, self._next(seq_id, taken[seq_id], replay))
        for seq_id in range(NUM_NAMES):
            room = ReservationPlan(self.cache).room(seq_id)
            assert left[seq_id] <= room
            self._refuse(seq_id, room + 1)

    def _refuse(self, seq_id: int, n: int) -> None:
        """Assert that n positions are too many; the invariants see that nothing changes."""
        free = self.cache.free_tokens()
        with pytest.raises(CapacityError, match="Fix"):
            self.cache.reserve(seq_id, n)
        assert self.cache.free_tokens() == free

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reserve_and_take_back(self, data: st.DataObject) -> None:
        """A pass that reserved, wrote garbage and failed leaves nothing behind."""
        seq_id = self._draw_held(data)
        n = data.draw(st.integers(0, ReservationPlan(self.cache).room(seq_id)))
        feed(self.cache, seq_id, [-1] * n)
        self.cache.truncate_to(seq_id, len(self.held[seq_id]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq_id = self._draw_held(data)
        n = data.draw(st.integers(0, len(self.held[seq_id])))
        assert self.cache.holds_window(seq_id, n) == self._holds_window(seq_id, n)
        if not self._holds_window(seq_id, n):
            with pytest.raises(ValueError, match="given back"):
                self.cache.truncate_to(seq_id, n)
            return
        self.cache.truncate_to(seq_id, n)
        self._keep(seq_id, self.held[seq_id][:n], n)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """All that a sequence holds is committed: what no later row sees is given back, and no more."""
        seq_id = self._draw_held(data)
        self.cache.drop_unseen(seq_id)
        unseen = self._unseen(len(self.held[seq_id]))
        self.gone[seq_id] = [max(pair) for pair in zip(self.gone[seq_id], unseen, strict=True)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """Any path, through shared positions, too; only shared positions may find no room for their copies."""
        seq_id = self._draw_held(data)
        tokens, free = self.held[seq_id], self.cache.free_tokens()
        base = data.draw(st.integers(0, len(tokens)))
        nodes = range(len(tokens) - base)
        path = sorted(data.draw(st.sets(st.sampled_from(nodes)))) if nodes else []
        moves_gone = base == 0 and any(self.gone[seq_id]) and path != list(range(len(path)))
        if not self._holds_window(seq_id, base) or not self._holds_window(seq_id, base + len(path)) or moves_gone:
            with pytest.raises((ValueError, CapacityError), match=r"given back|has to move shared positions"):
                self.cache.compact(seq_id, base, path)
            return
        try:
            self.cache.compact(seq_id, base, path)
        except CapacityError:
            own, others = set(self.cache.table(seq_id)), [each for each in self.held if each != seq_id]
            forked = any(own & set(self.cache.table(each)) for each in others)
            assert self.name in SHARING or forked, "refused although no position is shared"
            assert free < len(path) + 2 * BLOCK, "refused although there was room"
            return
        moved = path != list(range(len(path)))
        self._keep(seq_id, tokens[:base] + [tokens[base + node] for node in path], base if moved else base + len(path))

    @precondition(lambda self: 0 < len(self.held) < NUM_NAMES)
    @rule(data=st.data(), go_on=st.booleans())
    def fork(self, data: st.DataObject, go_on: bool) -> None:
        src = self._draw_held(data)
        dst = data.draw(st.sampled_from(self._unknown()))
        try:
            self.cache.fork(src, dst)
        except CapacityError:
            assert self.cache.free_tokens() < len(self.held[src]), "refused although there was room"
            return
        self._hold(dst, list(self.held[src]), self.cache_salt[src], self.indexed[src])
        self.gone[dst] = list(self.gone[src])
        for seq_id in (src, dst):
            if go_on and ReservationPlan(self.cache).room(seq_id):
                self._feed(seq_id, self._new(1))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), uncommitted=st.integers(0, 5))
    def index(self, data: st.DataObject, uncommitted: int) -> None:
        """Index committed tokens; drafts may follow, or the newest token, which has not been fed yet."""
        seq_id = self._draw_held(data)
        committed = self.held[seq_id][: max(0, len(self.held[seq_id]) - uncommitted)]
        self._index(seq_id, committed if uncommitted else committed + self._new(1))

    def _index(self, seq_id: int, tokens: list[int]) -> None:
        self.cache.insert_prefix(seq_id, tokens)
        n = min(len(tokens), len(self.held[seq_id]))
        self.indexed[seq_id] = max(self.indexed[seq_id], full(n))
        if len(tokens) >= BLOCK:
            self.past.append(tuple(tokens))
        self.known.update((self.cache_salt[seq_id], tuple(tokens[: full(m)])) for m in range(n + 1))

    @precondition(lambda self: len(self.held) < NUM_NAMES)
    @rule(
        data=st.data(),
        cache_salt=st.sampled_from(SALTS),
        own=st.just(0) | st.integers(1, 9),
        goes_on=st.booleans(),
        limit=st.none() | st.integers(0, MAX_LEN),
    )
    def adopt(self, data: st.DataObject, cache_salt: str, own: int, goes_on: bool, limit: int | None) -> None:
        """Adopt the known prefix of a prompt that repeats an earlier one up to its end; maybe feed the rest."""
        seq_id = data.draw(st.sampled_from(self._unknown()))
        past = data.draw(st.sampled_from(self.past or [()]))
        common = data.draw(st.sampled_from([len(past), full(len(past))]) | st.integers(0, len(past)))
        tokens = [*past[:common], *self._new(own)]
        n = self.cache.match_prefix(seq_id, tokens, cache_salt, limit)
        self._check_adopted(tokens, cache_salt, n, len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1))
        self._hold(seq_id, tokens[:n], cache_salt, full(n))
        self.gone[seq_id] = self._unseen(n)
        if goes_on and ReservationPlan(self.cache).room(seq_id) >= len(tokens) - n:
            self._feed(seq_id, tokens[n:])
            self._index(seq_id, tokens)

    def _check_adopted(self, tokens: list[int], cache_salt: str, n: int, most: int) -> None:
        """No more than was indexed under this salt, and no less than is held and indexed now, up to `most`."""
        used = -(-n // BLOCK) * BLOCK
        assert n == max(0, min(used, most)), "the last token has to be fed, and no other of a full block"
        assert n == 0 or (cache_salt, tuple(tokens[:used])) in self.known
        sure = [
            (s, max(0, min(full(num_common(tokens, self.held[s][: self.indexed[s]])), most)))
            for s in self.held
            if self.cache_salt[s] == cache_salt
        ]
        least = max((length for s, length in sure if self._holds_window(s, length)), default=0)
        least = least if self.name in SHARING else 0
        assert n >= least, "less than what a live sequence has indexed"
        assert n == 0 or self.name in SHARING

    @rule(seq_id=st.integers(0, NUM_NAMES - 1))
    def release(self, seq_id: int) -> None:
        self.cache.release(seq_id)
        for known in (self.held, self.cache_salt, self.indexed, self.gone):
            known.pop(seq_id, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), beyond=st.integers(1, 3))
    def misuse(self, data: st.DataObject, beyond: int) -> None:
        """Senseless calls are refused and change nothing."""
        seq_id = self._draw_held(data)
        n = len(self.held[seq_id])
        with pytest.raises(ValueError, match="truncate_to"):
            self.cache.truncate_to(seq_id, n + beyond)
        with pytest.raises(ValueError, match="truncate_to"):
            self.cache.truncate_to(seq_id, -beyond)
        with pytest.raises(ValueError, match="compact"):
            self.cache.compact(seq_id, max(0, n - 1), [beyond])
        with pytest.raises(ValueError, match="compact"):
            self.cache.compact(seq_id, 0, [0] * (beyond + 1))
        if n:
            with pytest.raises(ValueError, match="match_prefix"):
                self.cache.match_prefix(seq_id, [1, 2])
            with pytest.raises(ValueError, match="fork"):
                self.cache.fork(seq_id, seq_id)

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        for seq_id in range(NUM_NAMES):
            assert self.cache.length(seq_id) == len(self.held.get(seq_id, []))
        for seq_id, tokens in self.held.items():
            if tokens:
                assert_holds(self.cache, seq_id, tokens, self.windows)
        for group, pool in enumerate(self.cache.pools):
            self._check_blocks(group, pool)

    def _check_blocks(self, group: int, pool: BlockPool) -> None:
        """Assert that the blocks of a group's tables are all that is not free."""
        blocks = set[int]()
        for seq_id in self.held:
            table = table_of(self.cache, seq_id, group)
            gone = self.gone[seq_id][group] if self.name in WINDOWS else 0
            assert table[:gone] == [0] * gone
            blocks.update(table[gone:])
        assert pool.num_free == pool.num_blocks - len(blocks), "a block is lost"

    def teardown(self) -> None:
        for seq_id in list(self.held):
            self.cache.release(seq_id)
        self.cache.check()
        assert self.cache.free_tokens() == self.capacity, "a leak"
        assert all(pool.num_free == pool.num_blocks for pool in self.cache.pools), "a leak"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CACHES]
)
def test_content_survives_any_use(name: str) -> None:
    machine: Any = type(f"{name.title()}Machine", (CacheMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(75), stateful_step_count=30))


def test_slots_continue_where_the_sequence_ends(cache: KVCache) -> None:
    feed(cache, 7, [1, 2])
    slots = cache.reserve(7, 3)
    assert (slots.seq_id, slots.start, slots.end, len(slots.slots)) == (7, 2, 5, 3)
    assert cache.length(7) == 5


def test_slots_of_different_sequences_never_meet(cache: KVCache) -> None:
    slots = [slot for seq_id in range(NUM_SEQS) for slot in cache.reserve(seq_id, MAX_LEN).slots]
    assert len(set(slots)) == NUM_SEQS * MAX_LEN


def test_every_promised_position_can_be_used(cache: KVCache) -> None:
    assert cache.free_tokens() >= NUM_SEQS * MAX_LEN
    for seq_id in range(NUM_SEQS):
        feed(cache, seq_id, [seq_id * 50 + i + 1 for i in range(MAX_LEN)])
    left = cache.free_tokens()
    with pytest.raises(CapacityError, match="Fix"):
        cache.reserve(NUM_SEQS, left + 1)
    assert cache.free_tokens() == left
    assert cache.length(NUM_SEQS) == 0
    cache.check()


def test_reserving_no_slots_always_succeeds(cache: KVCache) -> None:
    for seq_id in range(cache.num_blocks):
        feed(cache, seq_id, [seq_id] * cache.block_size)
    assert cache.free_tokens() == 0
    for seq_id, length in ((0, cache.block_size), (99, 0)):
        slots = cache.reserve(seq_id, 0)
        assert (slots.start, slots.end) == (length, length)
    plan = ReservationPlan(cache)
    assert plan.take(99, 0)
    assert not plan.take(99, 1)
    assert [plan.room(seq_id) for seq_id in (98, 99)] == [0, 0]
    cache.check()


def test_a_plan_counts_its_blocks_and_takes_none(cache: KVCache) -> None:
    feed(cache, 1, [1, 2])
    plan, free = ReservationPlan(cache), cache.free_tokens()
    left = plan.room(1)
    for n in (1, 2):
        plan.take(1, n)
    assert plan.room(1) == left - 3
    others = range(2, 2 + cache.num_blocks - -(-5 // cache.block_size))
    for seq_id in others:
        plan.take(seq_id, cache.block_size)
    assert plan.room(others.stop) == 0
    assert (cache.free_tokens(), cache.length(1), cache.length(2)) == (free, 2, 0)


def test_a_shared_prefix_is_adopted_without_its_last_token(cache: KVCache, request: pytest.FixtureRequest) -> None:
    feed(cache, 1, range(8))
    cache.insert_prefix(1, range(9))
    known = {9: 8, 8: 7} if request.node.callspec.params["cache"] in SHARING else {9: 0, 8: 0}
    for seq_id, n in known.items():
        assert cache.match_prefix(seq_id, range(seq_id)) == n
        feed(cache, seq_id, [*range(n, 8), 99])
        assert_holds(cache, seq_id, [*range(8), 99])
    assert_holds(cache, 1, range(8))


@pytest.mark.parametrize("tokens", [[], [1]])
def test_a_prompt_that_is_fed_whole_adopts_nothing(cache: KVCache, tokens: list[int]) -> None:
    assert cache.match_prefix(1, tokens) == 0
    feed(cache, 1, [1, 2])
    assert_holds(cache, 1, [1, 2])


def test_only_held_prefixes_are_not_forgotten(cache: KVCache) -> None:
    feed(cache, 1, range(9))
    feed(cache, 2, range(20, 29))
    for seq_id, tokens in ((1, range(9)), (2, range(20, 29))):
        cache.insert_prefix(seq_id, tokens)
    cache.release(2)
    held_and_kept = cache.match_prefix(3, range(20, 29))
    cache.release(3)
    assert cache.forget_prefixes() == (held_and_kept == 0)
    cache.check()
    assert cache.match_prefix(4, range(20, 29)) == 0
    assert cache.match_prefix(5, range(9)) == held_and_kept
    for seq_id in (1, 4, 5):
        cache.release(seq_id)
    assert cache.forget_prefixes()
    assert cache.match_prefix(6, range(9)) == 0
    cache.release(6)
    assert cache.free_tokens() == cache.num_blocks * cache.block_size
    cache.check()


def test_a_released_sequence_begins_anew(cache: KVCache) -> None:
    feed(cache, 1, [1, 2, 3])
    cache.release(1)
    assert cache.length(1) == 0
    feed(cache, 1, [9])
    assert_holds(cache, 1, [9])


def test_a_fork_is_independent_of_its_source(cache: KVCache) -> None:
    feed(cache, 1, [1, 2, 3])
    cache.fork(1, 2)
    cache.truncate_to(1, 1)
    feed(cache, 1, [8, 9])
    feed(cache, 2, [4])
    assert_holds(cache, 1, [1, 8, 9])
    assert_holds(cache, 2, [1, 2, 3, 4])
    cache.release(1)
    assert_holds(cache, 2, [1, 2, 3, 4])


def test_a_tree_is_compacted_to_its_accepted_path(cache: KVCache) -> None:
    feed(cache, 1, [1, 2])
    feed(cache, 1, [10, 11, 12, 13, 14])
    cache.compact(1, 2, (1, 3, 4))
    assert_holds(cache, 1, [1, 2, 11, 13, 14])


def test_a_path_beyond_the_draft_is_refused_and_moves_nothing(cache: KVCache) -> None:
    feed(cache, 1, [1, 2, 3, 4])
    for base, path in ((2, [1, 2]), (5, []), (1, [-1]), (2, [0, 1, 2])):
        with pytest.raises(ValueError, match="compact"):
            cache.compact(1, base, path)
        assert_holds(cache, 1, [1, 2, 3, 4])


def test_a_path_that_does_not_rise_is_refused_and_moves_nothing(cache: KVCache) -> None:
    feed(cache, 1, [1, 2, 3, 4])
    for path in ([1, 0], [0, 0], [1] * (cache.block_size + 1)):
        with pytest.raises(ValueError, match="compact"):
            cache.compact(1, 2, path)
        assert_holds(cache, 1, [1, 2, 3, 4])


def test_writing_one_sequence_leaves_its_neighbours_alone(cache: KVCache) -> None:
    for seq_id in (1, 2, 3):
        feed(cache, seq_id, [seq_id] * MAX_LEN)
    cache.truncate_to(2, 0)
    feed(cache, 2, [99] * MAX_LEN)
    assert_holds(cache, 1, [1] * MAX_LEN)
    assert_holds(cache, 3, [3] * MAX_LEN)


def test_slotted_memory_that_does_not_fit_says_what_to_lower() -> None:
    huge = CacheShape(1000, 1000, 1000, torch.float64, torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"GiB.*\n.*max_num_seqs"):
        slotted_cache(huge, 1_000, 1_000_000)
