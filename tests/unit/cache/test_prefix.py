"""The prefix index alone: blocks are found by all the tokens up to their end, and by nothing less."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculant.cache import PrefixIndex, PrefixTree


def insert(index: PrefixIndex, tokens: Sequence[int], blocks: Sequence[int], cache_salt: str = "") -> None:
    """Put blocks of two tokens each into the index."""
    node = index.tree.root(cache_salt)
    for place, block in enumerate(blocks):
        node = index.tree.child(node, tokens, place)
        index.insert(node, block)


def found(index: PrefixIndex, tokens: Sequence[int], cache_salt: str = "") -> list[int | None]:
    index.check()
    return [index.block(node) for node in index.tree.match(tokens, cache_salt)]


@pytest.fixture
def index() -> PrefixIndex:
    #  1 2 (block 10) - 3 4 (11) - 5 6 (12)
    #                 \ 7 8 (13)
    index = PrefixIndex(PrefixTree(2))
    insert(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    insert(index, [1, 2, 7, 8], [10, 13])
    return index


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12]),
        ([1, 2, 3, 4, 5], [10, 11]),
        ([1, 2, 7, 8], [10, 13]),
        ([1, 2, 5, 6], [10]),
        ([3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_the_longest_known_prefix_is_found(index: PrefixIndex, tokens: list[int], blocks: list[int]) -> None:
    assert found(index, tokens) == blocks


def test_the_same_tokens_after_others_are_another_block(index: PrefixIndex) -> None:
    insert(index, [3, 4, 3, 4], [20, 21])
    assert found(index, [3, 4, 3, 4]) == [20, 21]
    assert found(index, [1, 2, 3, 4, 3, 4]) == [10, 11]


def test_tokens_of_equal_hash_are_distinguished(index: PrefixIndex) -> None:
    assert hash((-1, -1)) == hash((-2, -2)), "a property of Python that this test needs"
    insert(index, [-1, -1], [20])
    assert found(index, [-2, -2]) == []


def test_a_second_insertion_returns_the_known_block(index: PrefixIndex) -> None:
    assert index.insert(index.tree.child(index.tree.root(""), [1, 2], 0), 20) == 10
    assert 20 not in index
    assert found(index, [1, 2]) == [10]


def test_a_salt_finds_its_own_blocks_alone(index: PrefixIndex) -> None:
    assert found(index, [1, 2], "tenant") == []
    insert(index, [1, 2], [20], "tenant")
    assert found(index, [1, 2], "tenant") == [20]
    assert found(index, [1, 2]) == [10]


def test_descendants_of_a_removed_block_are_removed_too(index: PrefixIndex) -> None:
    assert sorted(index.remove(11)) == [11, 12]
    assert found(index, [1, 2, 3, 4, 5, 6]) == [10]
    assert found(index, [1, 2, 7, 8]) == [10, 13]
    assert [block in index for block in (10, 11, 12, 13)] == [True, False, False, True]


def test_removed_tokens_can_be_put_in_again(index: PrefixIndex) -> None:
    index.remove(10)
    insert(index, [1, 2, 3, 4], [12, 10])
    assert found(index, [1, 2, 3, 4, 5, 6]) == [12, 10]


def test_salts_do_not_pile_up(index: PrefixIndex) -> None:
    """Strangers choose them: a salt is forgotten with its last block, and not sooner."""
    root = index.tree.root("")
    index.remove(11)
    assert index.tree.root("") is root
    index.remove(10)
    assert index.tree.root("") is not root
