"""A checksum is the same on every instruction set and for any number of threads, and differs for other bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.examples import examples
from tests.native import SETS, needs_kernels, on

pytestmark = needs_kernels
KERNELS = [on(isa, threads) for isa in SETS for threads in (1, 2)]
PIECE = 2**20
SIZES = (0, 1, 7, 8, 255, 256, 257, 4096, PIECE - 1, PIECE, PIECE + 9, 3 * PIECE + 300)


def random(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def checksum(memory: Tensor) -> int:
    """Return what all instruction sets and numbers of threads agree on."""
    (found,) = {kernels.checksum(memory) for kernels in KERNELS}
    return found


@pytest.mark.parametrize("size", SIZES)
def test_all_kernels_agree(size: int) -> None:
    assert 0 <= checksum(random(size)) < 2**64


def test_each_size_has_its_own_checksum() -> None:
    zeros = torch.zeros(2 * PIECE + 1000, dtype=torch.uint8)
    sizes = [*range(1, 600), PIECE, PIECE + 1, 2 * PIECE, len(zeros)]
    assert len({KERNELS[0].checksum(zeros[:size]) for size in sizes}) == len(sizes)


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
