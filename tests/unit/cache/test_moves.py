"""The copies that a cache makes in its storage, in plain integers."""

from __future__ import annotations

import pytest

from speculant.cache import KVCache, ReservationPlan
from speculant.errors import CapacityError
from tests.blocks import held_slots, moves_of, token_cache

BLOCK = 4


@pytest.fixture
def paged() -> KVCache:
    return token_cache(6, BLOCK)


def caches() -> list[KVCache]:
    return [token_cache(6, BLOCK), token_cache(2, 12, keep_prefixes=False, max_len=12)]


def test_slots_carry_copies_on_write(paged: KVCache) -> None:
    """Of a shared block those positions are copied that are held, and no others."""
    paged.reserve(1, 6)
    paged.fork(1, 2)
    assert not moves_of(paged)
    shared = held_slots(paged, 2)
    paged.reserve(2, 1)
    (moves,) = moves_of(paged)
    assert list(moves.sources) == shared[4:6]
    assert list(moves.targets) == held_slots(paged, 2)[4:6]
    assert not set(moves.targets) & set(held_slots(paged, 1))
    assert held_slots(paged, 1) == shared
    assert held_slots(paged, 2)[:4] == shared[:4]


@pytest.mark.parametrize("cache", caches(), ids=["paged", "slotted"])
def test_reserve_without_sharing_moves_nothing(cache: KVCache) -> None:
    for n in (3, 0, 4):
        cache.reserve(1, n)
    assert not moves_of(cache)


@pytest.mark.parametrize("cache", caches(), ids=["paged", "slotted"])
def test_compact_moves_only_positions_that_change(cache: KVCache) -> None:
    slots = list(cache.reserve(1, 7).slots)
    cache.compact(1, 2, [0, 2, 4])
    (moves,) = moves_of(cache)
    pairs = dict(zip(moves.sources, moves.targets, strict=True))
    assert {source: target for source, target in pairs.items() if source != target} == {
        slots[4]: slots[3],
        slots[6]: slots[4],
    }
    assert (cache.length(1), held_slots(cache, 1)) == (5, slots[:5])
    cache.compact(1, 2, [0, 1])
    assert not moves_of(cache)


def test_compact_copies_shared_positions_once(paged: KVCache) -> None:
    """Blocks on the way are copied and compacted by the same moves: no slot is written twice."""
    paged.reserve(1, 8)
    paged.fork(1, 2)
    before = held_slots(paged, 1)
    paged.compact(2, 1, [1, 2, 4, 6])
    (moves,) = moves_of(paged)
    assert list(moves.sources) == [before[0], *(before[1 + node] for node in (1, 2, 4, 6))]
    assert list(moves.targets) == held_slots(paged, 2)
    assert not set(moves.targets) & set(before)
    paged.check()


def test_of_two_holders_of_a_block_one_gets_a_copy() -> None:
    slotted = token_cache(2, 12, keep_prefixes=False, max_len=12)
    slotted.reserve(1, 5)
    slotted.fork(1, 2)
    shared, plan = held_slots(slotted, 1), ReservationPlan(slotted)
    assert (plan.take(1, 1), plan.take(2, 7), plan.room(1), plan.room(2)) == (True, True, 6, 0)
    slotted.reserve(2, 7)
    (moves,) = moves_of(slotted)
    assert (list(moves.sources), list(moves.targets)) == (shared, held_slots(slotted, 2)[:5])
    slotted.reserve(1, 7)
    assert not moves_of(slotted), "it is alone in its block by now"
    with pytest.raises(CapacityError, match="would hold 13 positions but its cache block has 12"):
        slotted.reserve(1, 1)


def test_refused_reservation_moves_nothing() -> None:
    paged = token_cache(2, BLOCK)
    paged.reserve(1, 6)
    paged.fork(1, 2)
    before = held_slots(paged, 2)
    with pytest.raises(CapacityError):
        paged.reserve(2, 1)
    assert held_slots(paged, 2) == before
    paged.check()


def test_a_table_that_was_given_out_never_changes(paged: KVCache) -> None:
    """A batch carries it, and may outlive the sequence."""
    paged.reserve(1, 9)
    table = paged.table(1)
    assert paged.table(1) is table, "made once"
    copy = list(table)
    paged.truncate_to(1, 3)
    paged.reserve(1, 9)
    paged.release(1)
    assert (list(table), table.itemsize) == (copy, 8)


@pytest.mark.parametrize(("limit", "known"), [(None, 8), (12, 8), (8, 8), (7, 7), (4, 4), (2, 2), (0, 0), (-1, 0)])
def test_match_prefix_takes_over_no_more_than_limit(paged: KVCache, limit: int | None, known: int) -> None:
    paged.reserve(1, 9)
    paged.insert_prefix(1, range(9))
    assert paged.match_prefix(2, range(9), limit=limit) == known == paged.length(2)
    assert list(paged.table(2)) == list(paged.table(1))[: -(-known // BLOCK)]
    paged.reserve(2, 9 - known)
    assert sum(map(len, moves_of(paged))) == known % BLOCK, (
        "a block that is taken over in part is copied before it is written"
    )
    paged.check()
