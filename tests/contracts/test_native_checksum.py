"""A checksum is the same on every instruction set and for any number of threads, and another for any other bytes."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculant.kernels.memory import Arena, aligned
from speculant.kernels.native import Kernels, open_kernels, usable_sets
from tests.examples import examples

SETS = usable_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels are not built")
KERNELS = [open_kernels(isa, threads) for isa in SETS for threads in (1, 2)]
PIECE = 2**20
SIZES = (0, 1, 7, 8, 255, 256, 257, 4096, PIECE - 1, PIECE, PIECE + 9, 3 * PIECE + 300)


def random(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def checksum(memory: Tensor) -> int:
    """Return what all instruction sets and numbers of threads agree on."""
    (found,) = {kernels.checksum(memory) for kernels in KERNELS if kernels is not None}
    return found


@pytest.mark.parametrize("size", SIZES)
def test_all_kernels_agree(size: int) -> None:
    assert 0 <= checksum(random(size)) < 2**64


def test_sizes_have_their_own_checksums() -> None:
    zeros = torch.zeros(2 * PIECE + 1000, dtype=torch.uint8)
    sizes = [*range(1, 600), PIECE, PIECE + 1, 2 * PIECE, len(zeros)]
    kernels = KERNELS[0]
    assert kernels is not None
    assert len({kernels.checksum(zeros[:size]) for size in sizes}) == len(sizes)


@settings(max_examples=examples(200))
@given(size=st.sampled_from(SIZES[1:]), place=st.integers(0, 2**24), mask=st.integers(1, 255))
def test_a_changed_byte_changes_it(size: int, place: int, mask: int) -> None:
    memory = random(size)
    before = checksum(memory)
    memory[place % size] ^= mask
    assert checksum(memory) != before


@settings(max_examples=examples(100))
@given(words=st.lists(st.integers(0, 255), min_size=2, max_size=2, unique=True), bit=st.integers(0, 7))
def test_two_equal_changes_do_not_cancel(words: list[int], bit: int) -> None:
    """The same bit of two words, the highest one too."""
    memory = random(4096)
    before = checksum(memory)
    for word in words:
        memory[8 * word + 7] ^= 1 << bit
    assert checksum(memory) != before


@settings(max_examples=examples(50))
@given(places=st.lists(st.integers(0, 15), min_size=2, max_size=2, unique=True))
def test_the_order_of_parts_counts(places: list[int]) -> None:
    memory = random(16 * 256).view(16, 256)
    before = checksum(memory)
    first, second = places
    memory[[first, second]] = memory[[second, first]]
    assert checksum(memory) != before


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 1), st.floats(0, 1)), max_size=12), st.integers(0, 90000))
def test_arena_gives_memory_of_its_own(sizes: list[tuple[int, float, float]], expected: int) -> None:
    arena, taken = Arena(KERNELS[0].touch, expected), []
    for value, (size, share, likely) in enumerate(sizes):
        memory = arena.take(size, int(likely * size))
        assert len(memory) == size
        assert size == 0 or memory.data_ptr() % 64 == 0
        memory.fill_(value)
        taken.append(arena.keep(memory, int(share * size)))
    for value, memory in enumerate(taken):
        assert bool((memory == value).all())


def test_arena_has_pages_of_zeros() -> None:
    arena = Arena(KERNELS[0].touch)
    first = arena.take(2**23, 0)
    assert not first.any()
    arena.keep(first, 100)
    assert arena.take(64, 64).data_ptr() == first.data_ptr() + 128
    assert arena.scratch(100).data_ptr() == arena.scratch(50).data_ptr()
    assert len(aligned(5)) == 5


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("first", "size"), [(0, 0), (0, 1), (4095, 2), (5, 2**21), (2**21 - 1, 2**22 + 77), (100, 5000)]
)
def test_touch_gets_the_pages_of_a_range(kernels: Kernels, first: int, size: int) -> None:
    memory = Arena(kernels.touch).take(2**24, 0)
    assert not any(resident(memory, 0, len(memory)))
    kernels.touch(memory[first : first + size])
    assert all(resident(memory, first, size))
    assert not any(resident(memory, 2**23, 2**22))
    assert not memory.any()


def resident(memory: Tensor, first: int, size: int) -> list[bool]:
    """Return whether the system has given the pages of some bytes."""
    found = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), found) == 0
    return [bool(each & 1) for each in found[first // mmap.PAGESIZE : -(-(first + size) // mmap.PAGESIZE)]]


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 900), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(0, 9000),
)
def test_arena_touches_pages_once(pieces: list[tuple[int, float, float]], expected: int) -> None:
    touched, taken, largest = list[int](), 0, max(size for size, *_ in pieces)
    arena = Arena(lambda memory: touched.extend(range(memory.data_ptr(), memory.data_ptr() + len(memory))), expected)
    slabs = []  # their addresses are not used again
    for size, likely, used in pieces:
        memory = arena.take(size, int(likely * size))
        slabs.append(memory)
        assert {*range(memory.data_ptr(), memory.data_ptr() + int(likely * size))} <= {*touched}
        arena.keep(memory, int(used * size))
        taken += int(used * size)
    assert len({*touched}) == len(touched)
    assert len(touched) <= max(taken, expected) + len(pieces) * (largest + 64), "not much more than is used"


def test_arena_touches_much_at_once() -> None:
    touched = list[int]()
    arena = Arena(lambda memory: touched.append(len(memory)), 100_000)
    for _ in range(100):
        arena.keep(arena.take(1024, 960), 960)
    assert len(touched) < 10
    assert sum(touched) == pytest.approx(96_000, rel=0.05)
