"""Linear layers of a 1B shape: the native kernels, torch's linear and oneDNN's prepacked one, beside reading memory.

16 Llama layers of Llama 3.2 1B's sizes, every one with weights of its own (973M parameters), in one run and in turn.
`of_probe` is the weights' bytes over the time, as a share of the speed of a plain read of the same bytes. GGUF's types
and fp8 have random blocks; int4 is Q4_K and int8 Q8_0, the types of most matrices. --types: the types to measure
beside bfloat16; each takes memory. --rows: numbers of rows; `rows_over_one` compares them with the first one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speculant.kernels.memory import aligned
from speculant.kernels.native import (
    BLOCK_SIZES,
    BLOCK_TYPES,
    FP8_BLOCK,
    SCALE_BYTES,
    Activation,
    Flag,
    Kernels,
    Op,
    Pass,
    Type,
    Weight,
    open_kernels,
)
from speculant.lab.bench.scripts import Benchmark, quartiles, ratio, timed
from speculant.models.native.ops import linear
from speculant.models.weights.rounding import ROUNDINGS

HIDDEN, INSIDE, QKV, LAYERS = 2048, 8192, 3072, 16
SHAPES = [
    (QKV, HIDDEN),
    (HIDDEN, HIDDEN),
    (INSIDE, HIDDEN),
    (INSIDE, HIDDEN),
    (HIDDEN, INSIDE),
]  # q/k/v, out, gate, up, down
BLOCKS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4", "zero4", "zero8")
ROUNDED = {name: rounding.most for name, rounding in ROUNDINGS.items()}
PLAIN = {"bfloat16": Type.BF16, "float16": Type.F16, **ROUNDED}
TYPES = {**PLAIN, **{name: BLOCK_TYPES[name] for name in (*BLOCKS, "fp8")}}
ROWS = [1, 2, 3, 5, 8, 9, 16]
FINITE = 0x3B  # a mask of bytes: any two of them are a float16 from 0 to 1, any four a positive float32 below 1


@dataclass(frozen=True)
class Native:
    """All layers packed as one type, and programs for some numbers of rows."""

    kernels: Kernels
    weights: list[Weight]
    ops: dict[int, Any]
    buffers: list[Tensor]

    @classmethod
    def pack(cls, kernels: Kernels, type_: Type, matrices: list[Tensor], rows: list[int]) -> Native:
        """Pack every layer, from the rows of all its matrices. rows: numbers of rows to run it with."""
        weights: list[Weight] = []
        for first in range(0, len(matrices), len(SHAPES)):
            qkv, out, gate, up, down = matrices[first : first + len(SHAPES)]
            weights += [kernels.pack(type_, qkv), kernels.pack(type_, out), kernels.pack(type_, gate, up)]
            weights.append(kernels.pack(type_, down))
        buffers = [torch.randn(max(rows), width) for width in (HIDDEN, INSIDE, QKV, HIDDEN, INSIDE)]
        return cls(kernels, weights, {count: cls._program(weights, buffers) for count in rows}, buffers)

    @staticmethod
    def _program(weights: list[Weight], buffers: list[Tensor]) -> Any:
        x, inside, *out = buffers  # no result is the next input: 16 layers of products would end in subnormal numbers
        ops: list[Op] = []
        for first in range(0, len(weights), 4):
            of = weights[first : first + 4]
            ops += [linear(of[0], x, out[0]), linear(of[1], x, out[1])]
            ops.append(linear(of[2], x, out[2], None, Flag.GATED, activation=Activation.SILU))
            ops.append(linear(of[3], inside, out[1]))
        return (Op * len(ops))(*ops)

    def run(self, rows: int) -> None:
        """Run all layers once."""
        self.kernels.run(self.ops[rows], Pass(rows=rows))

    def read(self, memory: Tensor) -> None:
        """Read as many bytes of this memory as the weights have."""
        self.kernels.read_seconds(memory[: self.num_bytes])

    @property
    def num_bytes(self) -> int:
        """How many bytes a pass reads."""
        return sum(weight.memory.numel() for weight in self.weights)


def rows_of(kernels: Kernels, name: str, matrices: list[Tensor]) -> list[Tensor]:
    """Return matrices in the form that a type is packed from; blocks are random."""
    if name == "float16":
        return [matrix.half() for matrix in matrices]
    if name in ROUNDED:
        return [kernels.round(ROUNDED[name], matrix) for matrix in matrices]
    if name not in (*BLOCKS, "fp8"):
        return matrices
    weights, size = (FP8_BLOCK, FP8_BLOCK + SCALE_BYTES) if name == "fp8" else BLOCK_SIZES[TYPES[name]]
    shapes = [(len(matrix), matrix.shape[1] // weights * size) for matrix in matrices]
    return [torch.randint(256, shape, dtype=torch.uint8).bitwise_and_(FINITE) for shape in shapes]


def run_plain(x: Tensor, inside: Tensor, matrices: list[Tensor], apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Run the layers as five linears each."""
    for first in range(0, len(matrices), len(SHAPES)):
        qkv, out, gate, up, down = matrices[first : first + len(SHAPES)]
        apply(x, qkv), apply(x, out), apply(inside, down)
        functional.silu(apply(x, gate)).mul_(apply(x, up))


def onednn(x: Tensor, packed: Tensor) -> Tensor:
    """Apply a weight that oneDNN has reordered."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return result


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time all layers in turn."""
    kernels = open_kernels()
    assert kernels is not None, "the native kernels are not built"
    matrices = [torch.randn(shape).mul_(0.02).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    names, rows = dict.fromkeys(["bfloat16", *arguments.types]), list(arguments.rows)
    native = {name: Native.pack(kernels, TYPES[name], rows_of(kernels, name, matrices), rows) for name in names}
    onednn_takes_it = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not on processors with AVX2 alone
    packed = [torch.ops.mkldnn._reorder_linear_weight(matrix, 1) for matrix in matrices if onednn_takes_it]
    probe = aligned(native["bfloat16"].num_bytes).fill_(1)
    x, inside = torch.randn(1, HIDDEN).bfloat16(), torch.randn(1, INSIDE).bfloat16()
    subjects: dict[str, Callable[[], Any]] = {
        "torch, 1 row": partial(run_plain, x, inside, matrices, functional.linear),
    }
    if packed:
        subjects["oneDNN prepacked, 1 row"] = partial(run_plain, x, inside, packed, onednn)
    for name, layers in native.items():
        subjects[f"{name}, read"] = partial(layers.read, probe)
        subjects |= {f"{name}, rows {count}": partial(layers.run, count) for count in rows}
    yield figures(timed(subjects, arguments.rounds), native, kernels, rows)


def figures(
    times: dict[str, list[float]], native: dict[str, Native], kernels: Kernels, rows: list[int]
) -> dict[str, Any]:
    """Return the times and their ratios, round by round."""
    one = f"bfloat16, rows {rows[0]}"
    seen: dict[str, Any] = {
        "instruction_set": kernels.isa,
        "seconds": {name: quartiles(values) for name, values in times.items()},
        "torch_over_native": ratio(times, "torch, 1 row", one),
    }
    if "oneDNN prepacked, 1 row" in times:
        seen["onednn_over_native"] = ratio(times, "oneDNN prepacked, 1 row", one)
    for name, layers in native.items():
        seen[name] = {
            "probe_gb_per_s": layers.num_bytes / quartiles(times[f"{name}, read"])["median"] / 1e9,
            "of_probe": {count: ratio(times, f"{name}, read", f"{name}, rows {count}") for count in rows},
            "rows_over_one": {
                count: ratio(times, f"{name}, rows {count}", f"{name}, rows {rows[0]}") for count in rows[1:]
            },
        }
    return seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Two cores of Zen 3: a further row of a group of 32 x 24 weights takes 6 ns in 4 bits and 11 in 8 "
    "bits, where memory takes 25 to 38 and 45 to 65: int4 5 rows 1.15 to 1.7 x one row, int8 1.05 to 1.3.",
    measure=measure, rounds=7,
    options={"types": {"nargs": "+", "choices": [*TYPES], "default": [*TYPES], "help": "beside bfloat16"},
             "rows": ROWS},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
