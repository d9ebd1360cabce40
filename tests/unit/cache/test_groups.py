"""Groups of layers with different windows: blocks, tables and prefixes of their own, and one length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speculant.cache import KVCache, Moves, ReservationPlan, first_seen, paged_cache, slotted_cache
from speculant.errors import CapacityError
from tests.blocks import moves_of, table_of, token_cache
from tests.caches import SHAPE, assert_holds, feed

BLOCK, WINDOW = 4, 6


@pytest.fixture
def cache() -> KVCache:
    return token_cache([12, 5], BLOCK, windows=[None, WINDOW])


def slide(cache: KVCache, seq_id: int, tokens: range) -> None:
    """Reserve, index and give back, block by block."""
    while cache.length(seq_id) < len(tokens):
        cache.reserve(seq_id, min(BLOCK, len(tokens) - cache.length(seq_id)))
        cache.insert_prefix(seq_id, tokens[: cache.length(seq_id)])
        cache.drop_unseen(seq_id)
        cache.check()


def num_free(cache: KVCache) -> list[int]:
    return [pool.num_free for pool in cache.pools]


def test_the_longest_window_is_the_first_group() -> None:
    shape = replace(SHAPE, num_layers=5, windows=(4, None, 100, 4, None))
    assert [tuple(group) for group in shape.groups] == [(None, (1, 4)), (100, (2,)), (4, (0, 3))]
    assert replace(shape, windows=()).groups[0].layers == (0, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="2 windows for 5 layers"):
        replace(shape, windows=(4, None))


@pytest.mark.parametrize(("window", "length", "first"), [(None, 9, 0), (1, 9, 9), (2, 9, 8), (6, 5, 0), (6, 6, 1)])
def test_a_row_sees_its_window_itself_included(window: int | None, length: int, first: int) -> None:
    assert first_seen(window, length) == first


def test_a_table_has_a_part_for_each_group(cache: KVCache) -> None:
    slide(cache, 1, range(18))
    full, windowed = (table_of(cache, 1, group) for group in range(2))
    assert (len(full), len(windowed), windowed[:3]) == (5, 5, [0, 0, 0])
    assert num_free(cache) == [7, 3]
    assert cache.table(1) is cache.table(1), "made once"
    cache.release(1)
    assert len(cache.table(1)) == 0
    assert num_free(cache) == [12, 5]


def test_a_group_without_room_refuses_and_nothing_changes(cache: KVCache) -> None:
    cache.reserve(1, 15)
    cache.fork(1, 2)
    assert ReservationPlan(cache).take(3, 8), "the first group decides"
    with pytest.raises(CapacityError, match="3 more cache blocks for layers with a window of 6 positions and 1 of 5"):
        cache.reserve(3, 9)
    assert (cache.length(3), num_free(cache)) == (0, [8, 1])
    cache.reserve(2, 1)
    (moves,) = moves_of(cache)
    assert [len(each) for each in moves.by_group()] == [3, 3], "each group copies its shared block"
    cache.fork(1, 4)
    with pytest.raises(CapacityError, match="has to move shared positions"):
        cache.compact(4, 3, [2, 3])
    cache.check()


def test_a_length_whose_window_is_gone_is_refused(cache: KVCache) -> None:
    slide(cache, 1, range(18))
    for n, holds in ((18, True), (17, True), (16, False), (1, False), (0, True)):
        assert cache.holds_window(1, n) == holds
        if not holds:
            with pytest.raises(ValueError, match="were given back"):
                cache.truncate_to(1, n)
            with pytest.raises(ValueError, match="given back"):
                cache.compact(1, n, [])
    with pytest.raises(ValueError, match="given back"):
        cache.compact(1, 0, [1])
    assert cache.length(1) == 18
    cache.truncate_to(1, 0)
    assert num_free(cache) == [12, 5]
    cache.check()


def test_a_prefix_that_leaves_the_first_group_leaves_the_others() -> None:
    """Without the blocks of layers that see all positions, other blocks serve nobody, and are free for new ones."""
    cache = token_cache([12, 12], BLOCK, windows=[None, WINDOW])
    slide(cache, 1, range(16))
    cache.release(1)
    cache.reserve(2, 9 * BLOCK)  # 8 blocks are free, and the prefix's end is evicted
    assert [pool.num_kept for pool in cache.pools] == [3, 3]
    cache.check()
    assert cache.match_prefix(3, range(17)) == 12
    cache.check()


def test_prefixes_of_all_groups_are_forgotten(cache: KVCache) -> None:
    slide(cache, 1, range(12))
    assert not cache.forget_prefixes()
    cache.release(1)
    assert cache.forget_prefixes()
    assert cache.match_prefix(2, range(12)) == 0
    cache.check()


def test_storage_moves_each_group_s_slots() -> None:
    cache = paged_cache(replace(SHAPE, windows=(WINDOW, None)), [6, 3], BLOCK)
    assert [cache.storage.layer(layer)[0].shape[0] for layer in range(2)] == [3 * BLOCK, 6 * BLOCK]
    cache = paged_cache(replace(SHAPE, windows=(None, WINDOW)), [6, 3], BLOCK)
    feed(cache, 1, [5, 6, 7, 8])
    first, second = (table_of(cache, 1, group)[0] * BLOCK for group in range(2))
    cache.storage.move(Moves([first], [first + 1], (Moves([second + 2], [second + 1]),)))
    for layer, expected in ((0, [5, 5, 7, 8]), (1, [5, 7, 7, 8])):
        keys, _ = cache.storage.read(layer, slice(first, first + 4) if layer == 0 else slice(second, second + 4))
        assert [round(float(key - 10 * layer) / 100) for key in keys[:, 0, 0]] == expected


def test_slots_keep_all_positions_of_every_layer() -> None:
    cache = slotted_cache(replace(SHAPE, windows=(None, 1)), 2, 20)
    feed(cache, 1, range(1, 20))
    cache.drop_unseen(1)
    assert (cache.num_groups, cache.holds_window(1, 1)) == (1, True)
    cache.truncate_to(1, 1)
    assert_holds(cache, 1, [1])
