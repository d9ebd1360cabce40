"""A cache of blocks beyond the contract: sharing, copies on write, and blocks that are kept for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from speculant.cache import KVCache, ReservationPlan
from speculant.errors import CapacityError
from tests.blocks import assert_holds, feed, token_cache

BLOCK = 4
PROBE = 1000  # a sequence that only looks


def cache_of(num_blocks: int, keep_prefixes: bool = True) -> KVCache:
    return token_cache(num_blocks, BLOCK, keep_prefixes)


def serve(cache: KVCache, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> int:
    """Reserve positions for the tokens that are not indexed, and index them all; return how many were indexed."""
    known = cache.match_prefix(seq_id, tokens, cache_salt)
    feed(cache, seq_id, tokens[known:])
    cache.insert_prefix(seq_id, tokens)
    cache.check()
    return known


def serve_and_leave(cache: KVCache, seq_id: int, tokens: Sequence[int], cache_salt: str = "") -> int:
    known = serve(cache, seq_id, tokens, cache_salt)
    cache.release(seq_id)
    return known


def num_known(cache: KVCache, tokens: Sequence[int], cache_salt: str = "") -> int:
    """Return how many of the tokens are found, all of them if need be, and that they are theirs."""
    known = cache.match_prefix(PROBE, [*tokens, -1], cache_salt)
    assert_holds(cache, PROBE, tokens[:known])
    cache.release(PROBE)
    cache.check()
    return known


def blocks(cache: KVCache, seq_id: int) -> list[int]:
    return cache.table(seq_id).tolist()


def test_an_unknown_sequence_has_an_empty_table() -> None:
    """An unknown sequence of one cache does not affect another cache."""
    tables = [cache_of(2).table(PROBE) for _ in range(2)]
    assert [len(table) for table in tables] == [0, 0]
    assert tables[0] is not tables[1]


def num_free(cache: KVCache) -> int:
    return cache.free_tokens() // BLOCK


# What is found


@pytest.mark.parametrize(
    ("asked", "known"), [(1, 0), (3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8), (10, 8), (12, 8), (20, 8)]
)
def test_a_prompt_matches_full_blocks_but_not_its_last_token(asked: int, known: int) -> None:
    cache = cache_of(10)
    serve_and_leave(cache, 1, range(11))
    assert serve(cache, 2, range(asked)) == known
    assert_holds(cache, 2, range(asked))


def test_the_last_position_of_a_full_hit_is_rewritten_in_a_copy() -> None:
    cache = cache_of(4)
    serve(cache, 1, range(8))
    assert cache.match_prefix(2, range(8)) == 7
    cache.check()
    feed(cache, 2, [99])
    assert_holds(cache, 1, range(8))
    assert_holds(cache, 2, [*range(7), 99])
    assert (blocks(cache, 2)[0], num_free(cache)) == (blocks(cache, 1)[0], 1)


def test_a_block_that_is_not_full_is_not_indexed() -> None:
    cache = cache_of(4)
    serve(cache, 1, range(7))
    assert num_known(cache, range(7)) == 4
    feed(cache, 1, [7])
    assert num_known(cache, range(8)) == 4, "not before its tokens are told"
    cache.insert_prefix(1, range(8))
    assert num_known(cache, range(8)) == 8


def test_rejected_drafts_are_never_found() -> None:
    cache = cache_of(8)
    feed(cache, 1, [1, 2, 3])
    feed(cache, 1, [10, 11, 12, 13, 14, 15])
    cache.compact(1, 3, [1, 3])
    cache.insert_prefix(1, [1, 2, 3, 11, 13, 5])
    feed(cache, 1, [5, 6, 7])
    cache.insert_prefix(1, [1, 2, 3, 11, 13, 5, 6, 7])
    assert num_known(cache, [1, 2, 3, 10, 11, 12, 13, 14]) == 0
    assert num_known(cache, [1, 2, 3, 11, 12, 13, 14, 15]) == 4
    assert num_known(cache, [1, 2, 3, 11, 13, 5, 6, 7]) == 8


def test_moved_positions_are_found_by_their_present_tokens() -> None:
    cache = cache_of(8)
    serve(cache, 1, range(12))
    cache.compact(1, 4, range(3, 8))
    cache.insert_prefix(1, [*range(4), *range(7, 12)])
    assert num_known(cache, [*range(4), *range(7, 12)]) == 8
    assert num_known(cache, range(12)) == 12


def test_drafts_that_are_still_open_are_not_indexed() -> None:
    cache = cache_of(8)
    feed(cache, 1, range(12))
    cache.insert_prefix(1, range(6))
    assert num_known(cache, range(12)) == 4
    cache.compact(1, 6, [1, 4])
    cache.insert_prefix(1, [*range(6), 7, 10, 50])
    assert num_known(cache, [*range(6), 7, 10]) == 8


def test_salts_share_nothing() -> None:
    cache = cache_of(8)
    serve(cache, 1, range(8), "a")
    assert [num_known(cache, range(8), cache_salt) for cache_salt in ("a", "b", "")] == [8, 0, 0]


def test_a_fork_stays_within_its_salt() -> None:
    cache = cache_of(8)
    cache.match_prefix(1, range(8), "a")
    cache.fork(1, 2)
    feed(cache, 2, range(8))
    cache.insert_prefix(2, range(8))
    assert [num_known(cache, range(8), cache_salt) for cache_salt in ("a", "")] == [8, 0]


def test_nothing_is_kept_where_it_is_not_wanted() -> None:
    cache = cache_of(4, keep_prefixes=False)
    serve(cache, 1, range(8))
    assert num_known(cache, range(8)) == 0


# What is shared


def test_a_fork_copies_no_block_before_one_is_written() -> None:
    cache = cache_of(5)
    feed(cache, 1, range(6))
    cache.fork(1, 2)
    assert (blocks(cache, 1), num_free(cache)) == (blocks(cache, 2), 3)
    feed(cache, 2, [99])
    assert num_free(cache) == 2
    assert blocks(cache, 1)[0] == blocks(cache, 2)[0]
    feed(cache, 1, [6])
    assert num_free(cache) == 2, "it is alone in its last block by now"
    assert_holds(cache, 1, range(7))
    assert_holds(cache, 2, [*range(6), 99])


def test_a_sequence_switches_to_equal_indexed_blocks() -> None:
    cache = cache_of(6)
    for seq_id in (1, 2):
        feed(cache, seq_id, range(9))
    for seq_id in (1, 2):
        cache.insert_prefix(seq_id, range(9))
    assert blocks(cache, 1)[:2] == blocks(cache, 2)[:2]
    assert num_free(cache) == 2
    for seq_id in (1, 2):
        assert_holds(cache, seq_id, range(9))


def test_indexed_blocks_of_a_live_sequence_are_found() -> None:
    """Another had the start of it first, and its memory is needed."""
    cache = cache_of(5)
    serve(cache, 1, range(4))
    feed(cache, 2, range(8))
    cache.insert_prefix(2, range(8))
    cache.release(1)
    feed(cache, 3, [50] * cache.free_tokens())
    assert num_known(cache, range(8)) == 8
    cache.release(3)
    feed(cache, 2, range(8, 12))
    cache.insert_prefix(2, range(12))
    assert num_known(cache, range(12)) == 12


# What is given back


@pytest.mark.parametrize("n", range(13))
def test_exactly_the_blocks_after_a_cut_are_freed(n: int) -> None:
    cache = cache_of(4)
    feed(cache, 1, range(12))
    before = blocks(cache, 1)
    cache.truncate_to(1, n)
    assert blocks(cache, 1) == [block for place, block in enumerate(before) if place * BLOCK < n]
    assert num_free(cache) == 4 - len(blocks(cache, 1))
    assert_holds(cache, 1, range(n))


@pytest.mark.parametrize("drop", [lambda cache: cache.truncate_to(1, 3), lambda cache: cache.compact(1, 3, [])])
def test_a_cut_across_a_boundary_leaves_no_stale_block(drop: Callable[[KVCache], None]) -> None:
    cache = cache_of(4)
    feed(cache, 1, range(10))
    given_back = blocks(cache, 1)[1:]
    drop(cache)
    feed(cache, 2, [50] * 8)
    assert set(given_back) & set(blocks(cache, 2)), "else this proves nothing"
    feed(cache, 1, range(3, 8))
    assert not set(blocks(cache, 1)) & set(blocks(cache, 2))
    assert_holds(cache, 1, range(8))
    assert_holds(cache, 2, [50] * 8)


def test_kept_prefixes_count_as_free() -> None:
    cache = cache_of(4)
    serve_and_leave(cache, 1, range(8))
    assert (cache.free_tokens(), ReservationPlan(cache).room(2)) == (16, 16)
    feed(cache, 2, [50] * 16)
    assert num_known(cache, range(8)) == 0


def test_a_matched_prefix_is_no_longer_free() -> None:
    cache = cache_of(4)
    serve_and_leave(cache, 1, range(9))
    cache.match_prefix(2, range(9))
    assert num_free(cache) == 2
    feed(cache, 3, [50] * 8)
    assert_holds(cache, 2, range(8))


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = cache_of(4)
    prompts = {name: [name * 10 + i for i in range(BLOCK)] for name in (1, 2, 3)}
    for name, tokens in prompts.items():
        serve_and_leave(cache, name, tokens)
    cache.match_prefix(4, [*prompts[1], 5])
    cache.release(4)
    feed(cache, 5, [50] * 2 * BLOCK)
    assert {name: num_known(cache, tokens) for name, tokens in prompts.items()} == {1: 4, 2: 0, 3: 4}


def leave(cache: KVCache) -> None:
    cache.release(1)


def cut(cache: KVCache) -> None:
    cache.truncate_to(1, 0)


def move_and_leave(cache: KVCache) -> None:
    cache.compact(1, 0, range(1, 12))
    cache.check()
    cache.release(1)


@pytest.mark.parametrize("go", [leave, cut, move_and_leave])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_the_end_of_a_prefix_is_evicted_before_its_start(go: Callable[[KVCache], None], taken: int) -> None:
    cache = cache_of(7)
    serve(cache, 1, range(12))
    go(cache)
    feed(cache, 2, [50] * (4 + taken) * BLOCK)
    assert num_known(cache, range(12)) == (3 - taken) * BLOCK


def test_held_blocks_are_not_evicted() -> None:
    cache = cache_of(4)
    serve(cache, 1, range(8))
    serve_and_leave(cache, 2, [*range(8), *range(20, 24)])
    feed(cache, 3, [50] * 8)
    assert num_known(cache, [*range(8), *range(20, 24)]) == 8
    assert_holds(cache, 1, range(8))


# What there is no room for


def test_a_copy_needs_room_too() -> None:
    cache = cache_of(3)
    feed(cache, 1, range(6))
    cache.fork(1, 2)
    plan = ReservationPlan(cache)
    assert (plan.room(1), plan.room(2)) == (2, 2)
    plan.take(1, 2)
    assert plan.room(2) == 2, "it is alone in the block then"
    assert plan.take(2, 2)
    assert not plan.take(2, 1)
    feed(cache, 3, [50])
    assert [ReservationPlan(cache).room(seq_id) for seq_id in (1, 2, 3, 4)] == [0, 0, 3, 0]
    with pytest.raises(CapacityError, match=r"sequence 1 needs 1 more .* 0 of 3 are free\n.*Fix: raise kv_memory"):
        cache.reserve(1, 1)


def test_a_path_in_shared_blocks_needs_room_or_changes_nothing() -> None:
    cache = cache_of(4)
    feed(cache, 1, range(8))
    cache.fork(1, 2)
    feed(cache, 3, [50] * 4)
    with pytest.raises(CapacityError, match=r"sequence 2 has to move .* needs 2 more .*\n.*Fix: "):
        cache.compact(2, 0, [1, 2, 3, 4, 5])
    assert_holds(cache, 2, range(8))
    cache.compact(2, 4, [1, 2])
    assert_holds(cache, 1, range(8))
    assert_holds(cache, 2, [0, 1, 2, 3, 5, 6])
    cache.check()


def test_keeping_shared_positions_as_they_are_needs_no_room() -> None:
    cache = cache_of(2)
    feed(cache, 1, range(8))
    cache.fork(1, 2)
    cache.compact(2, 3, [0, 1])
    assert_holds(cache, 2, range(5))
    assert_holds(cache, 1, range(8))
