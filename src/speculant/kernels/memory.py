"""Memory for native kernels: aligned memory for weights, and reused memory for large tensors of every step.

The latter are logits and distributions. The C library would return such memory to the system when it is freed, and the
system would clear new pages for each step, which takes a tenth of the time of a small model with 8 sequences.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
LEAST_BYTES = 2**20  # smaller tensors are made as usual
MOST_BYTES = 2**28  # kept in all
MOST_SLAB = 2**28  # bytes that an arena takes from the system at once, unless one piece is larger
AHEAD_PER_TAKEN = 4  # pages touched ahead, as a multiple of the bytes taken so far
HUGE_BYTES = 2**22  # slabs of at least this size have huge pages, which the system provides several times as fast
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def aligned(size: int) -> Tensor:
    """Return `size` bytes of memory that are aligned to a cache line."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


class Arena:
    """Memory for the weights of a model; the size of each weight is known only after it was written.

    Pages take memory once they are written to. A slab lives as long as a tensor in it. touch: makes the system provide
    the pages of a range of bytes, for many bytes at once so that threads can share them evenly. expected: about how
    many bytes are taken in all; 0 = unknown.
    """

    def __init__(self, touch: Callable[[Tensor], None], expected: int = 0) -> None:
        self._touch, self._expected = touch, expected
        self._slab, self._used, self._touched, self._taken = _map(0), 0, 0, 0
        self._largest = 0
        self._scratch = _map(0)

    def take(self, size: int, likely: int) -> Tensor:
        """Return `size` aligned bytes. Call `keep` with the number of used bytes before taking more.

        likely: about how many bytes will be used; the pages of these are touched.
        """
        self._largest = max(self._largest, size)
        if size > len(self._slab) - self._used:
            usual = max(self._taken, self._expected - self._taken)
            self._slab, self._used, self._touched = _map(max(size, min(usual, MOST_SLAB))), 0, 0
        if self._used + likely > self._touched:
            ahead = min(self._expected - self._taken, AHEAD_PER_TAKEN * self._taken)
            most = len(self._slab) - self._largest - self._used  # further pieces may not fit in this slab
            end = self._used + max(likely, min(ahead, most))
            self._touch(self._slab[self._touched : end])
            self._touched = end
        return self._slab[self._used : self._used + size]

    def keep(self, memory: Tensor, size: int) -> Tensor:
        """Keep the first `size` bytes of the memory that was taken last."""
        whole = -(-size // ALIGNMENT) * ALIGNMENT
        self._used, self._taken = self._used + whole, self._taken + whole
        self._touched = max(self._touched, self._used)  # touching would overwrite bytes
        return memory[:size]

    def scratch(self, size: int) -> Tensor:
        """Return aligned bytes that the next call returns again."""
        if size > len(self._scratch):
            self._scratch = _map(size)
        return self._scratch[:size]


def _map(size: int) -> Tensor:
    """Return zeroed pages, which the system provides when they are written to."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Scratch:
    """Blocks of memory by size, a power of two. A block is free as soon as no tensor uses it."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._kept = 0
        self._lock = threading.Lock()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of float32 or float64 on the CPU whose values are not set."""
        count = math.prod(shape)
        if count * dtype.itemsize < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (count * dtype.itemsize - 1).bit_length()
        with self._lock:
            block = self._free(size)
            if block is None:
                return torch.empty(shape, dtype=dtype)
            return torch.from_numpy(block.view(_DTYPES[dtype])[:count].reshape(shape))

    def _free(self, size: int) -> np.ndarray | None:
        """Return a block of this size that nothing uses; None if there is none and no more may be kept."""
        blocks = self._blocks[size]
        for place in range(len(blocks)):
            if sys.getrefcount(blocks[place]) == 2:  # the list, and the call itself
                return blocks[place]
        if self._kept + size > MOST_BYTES:
            return None
        self._kept += size
        blocks.append(torch.empty(size, dtype=torch.uint8).numpy())  # torch aligns it
        return blocks[-1]
