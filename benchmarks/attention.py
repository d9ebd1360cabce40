"""Attention alone: the native kernels over keys and values in the cache, for prompts and for decoding after a text.

For a prompt, its last 256 rows are measured, with two key heads and one thread. Figures are GFLOP/s: each query has 4
times head_dim operations for each key that it sees. For decoding, all layers of a model's shape are measured, for one
row, for 5 drafted rows and for 8 sequences; each layer has keys of its own, scattered in blocks. Figures are
milliseconds of the thread's processor time, beside the time to read the same bytes from contiguous memory.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculant.kernels import TYPES, Code, Kernels, Op, Pass, address, open_kernels
from speculant.lab.bench import Benchmark
from speculant.models import NO_STATES

BLOCK = 16
PROMPT_ROWS = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = {"1.5B": (28, 12, 2, 128), "1B": (16, 32, 8, 64)}  # layers, heads, key heads, head_dim
DECODING = {"1 row": (1, 1), "5 rows": (1, 5), "8 sequences": (8, 1)}  # sequences, and rows of each


@dataclass(frozen=True)
class Shape:
    """Layers of attention."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


class Attention:
    """A pass of attention alone, for sequences with equal numbers of rows after equal numbers of tokens."""

    def __init__(self, shape: Shape, sequences: int, start: int, rows: int) -> None:
        blocks, count = -(-(start + rows) // BLOCK), sequences * rows
        self._tables = torch.randperm(sequences * blocks).reshape(sequences, blocks)
        slots = sequences * blocks * BLOCK
        self._storage = [self._numbers(shape, slots) for _ in range(2 * shape.layers)]
        self._queries = torch.randn(count, shape.heads + 2 * shape.kv_heads, shape.dim)
        self._out = torch.empty(count, shape.heads, shape.dim)
        self._ops = (Op * shape.layers)(*(self._op(shape, layer) for layer in range(shape.layers)))
        self._pointers = [array("Q", [each.data_ptr() for each in self._storage[i::2]]) for i in (0, 1)]
        segments = [
            (i * rows, rows, start, rows, -1, table.data_ptr(), blocks, 0, 0, 0, *NO_STATES)
            for i, table in enumerate(self._tables)
        ]
        self._segments = array("q", [value for segment in segments for value in segment])
        keys, values = map(address, self._pointers)
        self._pass = Pass(
            rows=count, num_segments=sequences, block=BLOCK, segments=address(self._segments), keys=keys, values=values
        )
        pairs = sequences * rows * (2 * start + rows + 1) // 2
        self.operations = 4 * pairs * shape.layers * shape.heads * shape.dim
        self.num_bytes = sum(each.numel() * each.element_size() for each in self._storage)

    @staticmethod
    def _numbers(shape: Shape, slots: int) -> Tensor:
        return torch.randn(BLOCK, shape.kv_heads, shape.dim).to(shape.dtype).repeat(slots // BLOCK, 1, 1)

    def _op(self, shape: Shape, layer: int) -> Op:
        return Op(
            code=Code.ATTEND, type=TYPES[shape.dtype], layer=layer, heads=shape.heads, kv_heads=shape.kv_heads,
            dim=shape.dim, factor=shape.dim**-0.5, source=self._queries.data_ptr(), out=self._out.data_ptr(),
        )  # fmt: skip

    def seconds(self, kernels: Kernels, rounds: int) -> float:
        """Return the least processor time of a pass: other programs add to it, and none takes from it."""
        return min(self._seconds(kernels) for _ in range(rounds))

    def _seconds(self, kernels: Kernels) -> float:
        started = time.thread_time()
        kernels.run(self._ops, self._pass)
        return time.thread_time() - started


def prompts(kernels: Kernels, tokens: Sequence[int], rounds: int) -> dict[str, float]:
    """Return GFLOP/s of the last rows of prompts."""
    found = dict[str, float]()
    for count in tokens:
        for dim in (64, 128):
            for group in (1, 4, 8):
                for name, dtype in DTYPES.items():
                    attention = Attention(Shape(1, 2 * group, 2, dim, dtype), 1, count - PROMPT_ROWS, PROMPT_ROWS)
                    speed = attention.operations / attention.seconds(kernels, rounds) / 1e9
                    found[f"{count} tokens, head_dim {dim}, groups of {group}, {name}"] = round(speed, 1)
    return found


def decoding(kernels: Kernels, tokens: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of all layers' attention, and of reading their keys and values."""
    found = dict[str, dict[str, float]]()
    for model, (layers, heads, kv_heads, dim) in MODELS.items():
        for name, (sequences, rows) in DECODING.items():
            for count in tokens:
                attention = Attention(Shape(layers, heads, kv_heads, dim, torch.bfloat16), sequences, count, rows)
                memory = torch.ones(attention.num_bytes, dtype=torch.uint8)
                read = min(kernels.read_seconds(memory) for _ in range(rounds))
                found[f"{model}, {name} after {count} tokens"] = {
                    "ms": round(1e3 * attention.seconds(kernels, rounds), 2),
                    "read_ms": round(1e3 * read, 2),
                }
    return found


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure with one thread."""
    kernels = open_kernels(None, 1)
    assert kernels is not None, "the native kernels are not built"
    seen: dict[str, Any] = {"instruction_set": kernels.isa}
    seen["prompts, GFLOP/s"] = prompts(kernels, arguments.prompts, arguments.rounds)
    yield seen
    seen["decoding"] = decoding(kernels, arguments.texts, arguments.rounds)
    yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="On AVX2, six queries at a time and shared tiles: prompts 45 to 60 GFLOP/s a core (was 20 to 33). After "
    "512 tokens, one row takes 2 ms at 1.5B (was 4) and 2.5 ms at 1B (was 5); reading the bytes takes 0.6 to 0.7.",
    measure=measure, rounds=15,
    options={"prompts": [512, 4096, 16384], "texts": [128, 512, 2048, 8192]},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
