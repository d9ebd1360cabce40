"""Trees of paths, and paths through trees."""

from __future__ import annotations

import math

import pytest

from speculant.types import DraftTree

PATHS = [(1, 2, 3), (1, 2, 4), (5,), (1, 6, 3)]


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens_to(node)) for node in range(tree.size)]


def test_what_paths_begin_with_is_one_node() -> None:
    tree = DraftTree.of_paths(PATHS)
    assert paths_of(tree) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,), (1, 6), (1, 6, 3)]
    assert all(parent < node for node, parent in enumerate(tree.parent_list))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (7, PATHS),
        (6, [(1, 2, 3), (1, 2, 4), (5,)]),
        (4, [(1, 2, 3), (1, 2, 4)]),
        (3, [(1, 2, 3)]),
        (2, [(5,)]),
        (0, []),
        (math.inf, PATHS),
    ],
)
def test_paths_that_do_not_fit_are_left_out(most: float, expected: list[tuple[int, ...]]) -> None:
    tree = DraftTree.of_paths(PATHS, most)
    assert tree.size <= most
    assert [path for path in PATHS if path in paths_of(tree)] == expected


def test_no_paths_and_empty_ones_make_an_empty_tree() -> None:
    for paths in ([], [()], [(), ()]):
        assert DraftTree.of_paths(paths).size == 0


def test_tokens_lead_through_a_tree_as_far_as_it_goes() -> None:
    tree = DraftTree.of_paths(PATHS)
    assert tree.path_along([1, 6, 3]) == [0, 5, 6]
    assert tree.path_along([1, 2, 9]) == [0, 1]
    assert tree.path_along([5, 1, 2]) == [4]
    assert tree.path_along([7]) == tree.path_along([]) == []
    assert DraftTree.empty().path_along([1]) == []
