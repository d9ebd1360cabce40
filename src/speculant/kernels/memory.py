"""Memory for native kernels: aligned for weights, and used again for large tensors that every step makes anew.

These are logits, and the distributions of drafts and target. The C library gives such memory back to the system when it
is freed, and each step then takes new pages, which have to be cleared: a tenth of the time of a small model with 8
sequences.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
LEAST_BYTES = 2**20  # smaller tensors are made as usual
MOST_BYTES = 2**28  # that are kept
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def aligned(size: int) -> Tensor:
    """Return `size` bytes of memory that are aligned to a cache line."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


class Scratch:
    """Blocks of memory by size, a power of two. One is free as soon as no tensor that lies in it is left."""

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
