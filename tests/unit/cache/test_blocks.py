"""The pool alone: every block is in one place, and the longest unused is evicted first."""

from __future__ import annotations

import pytest

from speculant.cache.paged import BlockPool
from speculant.cache.prefixes import PrefixIndex, PrefixNode, PrefixTree


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(PrefixTree(1))


@pytest.fixture
def pool(index: PrefixIndex) -> BlockPool:
    return BlockPool(3, index)


def insert(index: PrefixIndex, block: int, parent: PrefixNode | None = None) -> PrefixNode:
    """Put a block into the index, under a token of its own."""
    node = index.tree.child(parent or index.tree.root(""), [block], 0)
    index.insert(node, block)
    return node


def test_every_block_is_given_out_once(pool: BlockPool) -> None:
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    pool.check({0: 1, 1: 1, 2: 1})


def test_a_block_is_free_when_its_last_holder_leaves(pool: BlockPool) -> None:
    block = pool.allocate()
    pool.share(block)
    pool.free(block)
    assert pool.num_free == 2
    pool.check({block: 1})
    pool.free(block)
    assert (pool.num_free, pool.num_kept) == (3, 0)
    pool.check({})


def test_a_block_that_can_be_found_is_kept_and_counts_as_free(pool: BlockPool, index: PrefixIndex) -> None:
    block = pool.allocate()
    insert(index, block)
    pool.free(block)
    assert (pool.num_free, pool.num_kept, pool.is_kept(block)) == (3, 1, True)
    pool.check({})
    pool.share(block)
    assert (pool.num_free, pool.num_kept, pool.is_kept(block)) == (2, 0, False)
    pool.check({block: 1})


def test_only_the_single_holder_of_an_unindexed_block_can_write(pool: BlockPool, index: PrefixIndex) -> None:
    block = pool.allocate()
    assert pool.is_writable(block)
    pool.share(block)
    assert not pool.is_writable(block)
    pool.free(block)
    assert pool.is_writable(block)
    insert(index, block)
    assert not pool.is_writable(block)


def test_the_least_recently_used_block_is_evicted_when_needed(pool: BlockPool, index: PrefixIndex) -> None:
    first, second = pool.allocate(), pool.allocate()
    for block in (first, second):
        insert(index, block)
        pool.free(block)
    pool.share(first)
    pool.free(first)
    assert pool.allocate() not in (first, second), "a free block is left"
    assert [pool.allocate(), pool.allocate()] == [second, first]


def test_descendants_of_an_evicted_block_are_free_again(pool: BlockPool, index: PrefixIndex) -> None:
    start, end, held = (pool.allocate() for _ in range(3))
    node = insert(index, start)
    insert(index, end, node)
    insert(index, held, node)
    pool.free(start)
    pool.free(end)
    taken = pool.allocate()
    assert taken in (start, end)
    assert [block in index for block in (start, end, held)] == [False] * 3
    assert (pool.num_free, pool.num_kept) == (1, 0)
    pool.check({taken: 1, held: 1})
    pool.free(held)
    assert pool.num_kept == 0, "nobody could find it"


@pytest.mark.parametrize("held", [{}, {0: 2}, {0: 1, 1: 1}])
def test_a_wrong_count_is_noticed(pool: BlockPool, held: dict[int, int]) -> None:
    assert pool.allocate() == 0
    with pytest.raises(AssertionError, match="holders"):
        pool.check(held)
