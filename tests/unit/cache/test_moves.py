"""The copies that block managers order from a storage, in plain integers."""

from __future__ import annotations

import pytest

from speculant.cache import NO_MOVES, BlockManager, PagedBlockManager, Slots, SlottedBlockManager
from speculant.errors import CapacityError
from tests.blocks import held_slots

BLOCK = 4


@pytest.fixture
def paged() -> PagedBlockManager:
    return PagedBlockManager(6, BLOCK)


def managers() -> list[BlockManager]:
    return [PagedBlockManager(6, BLOCK), SlottedBlockManager(2, 12)]


def test_slots_carry_copies_on_write(paged: PagedBlockManager) -> None:
    """Of a shared block those positions are copied that are held, and no others."""
    paged.reserve(1, 6)
    assert not paged.fork(1, 2)
    shared = held_slots(paged, 2)
    moves = paged.reserve(2, 1).moves
    assert list(moves.sources) == shared[4:6]
    assert list(moves.targets) == held_slots(paged, 2)[4:6]
    assert not set(moves.targets) & set(held_slots(paged, 1))
    assert held_slots(paged, 1) == shared
    assert held_slots(paged, 2)[:4] == shared[:4]


@pytest.mark.parametrize("manager", managers(), ids=lambda manager: type(manager).__name__)
def test_reserve_without_sharing_moves_nothing(manager: BlockManager) -> None:
    assert [manager.reserve(1, n).moves for n in (3, 0, 4)] == [NO_MOVES] * 3


@pytest.mark.parametrize("manager", managers(), ids=lambda manager: type(manager).__name__)
def test_compact_moves_only_positions_that_change(manager: BlockManager) -> None:
    slots = list(manager.reserve(1, 7).slots)
    moves = manager.compact(1, 2, [0, 2, 4])
    pairs = dict(zip(moves.sources, moves.targets, strict=True))
    assert {source: target for source, target in pairs.items() if source != target} == {
        slots[4]: slots[3],
        slots[6]: slots[4],
    }
    assert (manager.length(1), held_slots(manager, 1)) == (5, slots[:5])
    assert not manager.compact(1, 2, [0, 1])


def test_compact_copies_shared_positions_once(paged: PagedBlockManager) -> None:
    """Blocks on the way are copied and compacted by the same moves: no slot is written twice."""
    paged.reserve(1, 8)
    paged.fork(1, 2)
    before = held_slots(paged, 1)
    moves = paged.compact(2, 1, [1, 2, 4, 6])
    assert list(moves.sources) == [before[0], *(before[1 + node] for node in (1, 2, 4, 6))]
    assert list(moves.targets) == held_slots(paged, 2)
    assert not set(moves.targets) & set(before)
    paged.check()


def test_slotted_fork_moves_every_position() -> None:
    slotted = SlottedBlockManager(2, 12)
    slotted.reserve(1, 5)
    moves = slotted.fork(1, 2)
    assert (list(moves.sources), list(moves.targets)) == (held_slots(slotted, 1), held_slots(slotted, 2))
    assert len(moves) == 5


def test_refused_reservation_moves_nothing() -> None:
    paged = PagedBlockManager(2, BLOCK)
    paged.reserve(1, 6)
    paged.fork(1, 2)
    before = held_slots(paged, 2)
    with pytest.raises(CapacityError):
        paged.reserve(2, 1)
    assert held_slots(paged, 2) == before
    paged.check()


@pytest.mark.parametrize("manager", managers(), ids=lambda manager: type(manager).__name__)
def test_slots_are_those_of_the_table(manager: BlockManager) -> None:
    first, second = manager.reserve(1, 3), manager.reserve(1, 4)
    assert [*first.slots, *second.slots] == held_slots(manager, 1)
    assert (first.end, second.start, second.end) == (3, 3, 7)
    assert Slots(1, 3, [7, 8]).end == 5


def test_a_table_that_was_given_out_never_changes(paged: PagedBlockManager) -> None:
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
def test_match_prefix_takes_over_no_more_than_limit(paged: PagedBlockManager, limit: int | None, known: int) -> None:
    paged.reserve(1, 9)
    paged.insert_prefix(1, range(9))
    assert paged.match_prefix(2, range(9), limit=limit) == known == paged.length(2)
    assert list(paged.table(2)) == list(paged.table(1))[: -(-known // BLOCK)]
    moves = paged.reserve(2, 9 - known).moves
    assert len(moves) == known % BLOCK, "a block that is taken over in part is copied before it is written"
    paged.check()
