"""Measures the two costs of decoding on this machine: reading memory, and multiplying a row by a matrix."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculant.models.backends.base import Packing

REPEATS = 5  # the best one is reported
BANDWIDTH_BYTES = 256 * 2**20  # well beyond the caches
N, K = 8192, 6144  # 96 MiB of bfloat16
DEPTHS = (2048, 8192)  # of a model of a billion weights


@dataclass(frozen=True)
class Speeds:
    """Speeds in GB/s; None = the native kernels were not built."""

    read: float  # all threads together: the bound on decoding at batch 1
    torch_linear: float  # bfloat16 weights, one row
    native_linear: float | None
    packing: Packing | None = None  # what weight_packing="auto" chooses for a large model


def measure_speeds() -> Speeds:
    """Measure the speeds; takes one or two seconds."""
    import torch

    from speculant.kernels.memory import aligned
    from speculant.kernels.native import Op, Pass, Type, open_kernels
    from speculant.models.native.program import linear
    from speculant.models.weights.packings import choose, measure_gains, timed_bytes

    kernels = open_kernels()
    weight, x = torch.ones(N, K, dtype=torch.bfloat16), torch.ones(1, K)
    narrow, num_bytes = x.bfloat16(), 2 * N * K
    with torch.inference_mode():
        by_torch = num_bytes / _best(lambda: torch.nn.functional.linear(narrow, weight)) / 1e9
    if kernels is None:
        data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
        return Speeds(BANDWIDTH_BYTES / _best(data.sum) / 1e9, by_torch, None)
    memory = aligned(BANDWIDTH_BYTES).fill_(1)
    read = BANDWIDTH_BYTES / min(kernels.read_seconds(memory) for _ in range(REPEATS)) / 1e9
    packed, out = kernels.pack(Type.BF16, weight), torch.empty(1, N)
    ops = (Op * 1)(linear(packed, x, out))
    native = num_bytes / _best(lambda: kernels.run(ops, Pass(rows=1))) / 1e9
    return Speeds(read, by_torch, native, choose(measure_gains(kernels, DEPTHS, timed_bytes())))


def _best(work: Callable[[], object]) -> float:
    """Return the shortest time of REPEATS runs, in seconds."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
