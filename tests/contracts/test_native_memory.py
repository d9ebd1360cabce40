"""Memory for weights: each piece has its own pages, which the system gives before they are written."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.kernels import Arena, Kernels, aligned
from tests.examples import examples
from tests.native import SETS, needs_kernels, on

pytestmark = needs_kernels
KERNELS = [on(isa, threads) for isa in SETS for threads in (1, 2)]


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
