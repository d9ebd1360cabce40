"""Memory from the system in huge pages where it has them: it provides them, and reads them, faster than small ones."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_BYTES = 2**22  # memory of at least this size has huge pages


def pages(size: int) -> Tensor:
    """Return `size` zeroed bytes, which the system provides when they are written to. Raises OSError without room."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose values are not set. Raises OSError or RuntimeError if there is no memory for it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return pages(size).view(dtype).view(shape)
