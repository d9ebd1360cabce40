"""Paths through trees."""

from __future__ import annotations

import pytest

from speculant.types import DraftTree

TREE = DraftTree.of([1, 2, 3, 4, 5, 6, 3], [-1, 0, 1, 1, -1, 0, 5])


@pytest.mark.parametrize(
    ("tokens", "path"), [([1, 6, 3], [0, 5, 6]), ([1, 2, 9], [0, 1]), ([5, 1, 2], [4]), ([7], []), ([], [])]
)
def test_a_path_follows_tokens_as_far_as_the_tree_reaches(tokens: list[int], path: list[int]) -> None:
    assert TREE.path_along(tokens) == path
    assert DraftTree.empty().path_along(tokens) == []


def test_a_child_is_the_first_with_its_token() -> None:
    tree = DraftTree.of([1, 1, 2, 2], [-1, -1, 0, 1])
    assert [tree.child(-1, 1), tree.child(1, 2), tree.child(0, 1), tree.child(-1, 2)] == [0, 3, None, None]
