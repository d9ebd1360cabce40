"""The masks, drawn out."""

from __future__ import annotations

from array import array

import torch

from speculant.models import Batch, Segment, context_slots, visible_keys
from speculant.types import DraftTree


def drawn(start: int, positions: list[int], tree: DraftTree, window: int | None = None) -> list[str]:
    segment = Segment(0, start, len(positions), array("q", [0]), tree.parent_list)
    mask = visible_keys(segment, torch.tensor(positions), window)
    return ["".join("#" if visible else "." for visible in row) for row in mask.tolist()]


def test_a_chunk_sees_its_context_and_itself() -> None:
    assert drawn(2, [2, 3, 4], DraftTree.empty()) == ["###..", "####.", "#####"]


def test_a_window_counts_the_row_itself() -> None:
    assert drawn(2, [2, 3, 4], DraftTree.empty(), window=2) == [".##..", "..##.", "...##"]


def test_a_node_sees_its_ancestors_but_no_cousin() -> None:
    #      root - 0 - 2
    #           \ 1 - 3
    tree = DraftTree(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, -1, 0, 1]))
    assert drawn(1, [1, 2, 2, 3, 3], tree) == ["##....", "###...", "##.#..", "###.#.", "##.#.#"]


def test_a_window_is_counted_along_the_path() -> None:
    tree = DraftTree(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, -1, 0, 1]))
    assert drawn(1, [1, 2, 2, 3, 3], tree, window=2) == ["##....", ".##...", ".#.#..", "..#.#.", "...#.#"]


def test_context_slots_follow_each_block_table() -> None:
    """A table of one block is a slice, however large the block is; others are cut where the sequence ends."""
    tables, ends = [[7], [3, 0], [5], [2, 9, 1]], [3, 5, 1, 10]
    segments = [
        Segment(i, end - 1, 1, array("q", table)) for i, (table, end) in enumerate(zip(tables, ends, strict=True))
    ]
    rows = torch.zeros(4, dtype=torch.int64)
    slots = context_slots(Batch(rows, rows, rows, tuple(segments), block_size=4))
    assert slots[0] == slice(28, 31)
    assert slots[2] == slice(20, 21)
    found = [each.tolist() for each in slots if not isinstance(each, slice)]
    assert found == [[12, 13, 14, 15, 0], [8, 9, 10, 11, 36, 37, 38, 39, 4, 5]]
