"""The native kernels: one shared library, called through ctypes with raw pointers (csrc/speculant.h), and its sampler.

It is loaded at its first use with the best instruction set that is used by default here; SPECULANT_ISA names
another one. Without the library everything runs on `reference`.

Memory for native kernels: aligned memory for weights, and reused memory for large tensors of every step.

The latter are logits and distributions. The C library would return such memory to the system when it is freed, and the
system would clear new pages for each step, which takes a tenth of the time of a small model with 8 sequences.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.counts import TokenCounts
from speculant.errors import ConfigError, Converts, ModelError, suggest
from speculant.kernels.base import VERSION, Edits, RowDraw, Sampler, SamplingSettings
from speculant.kernels.pages import pages
from speculant.kernels.reference import REFERENCE, own_scores

ALIGNMENT = 64  # bytes
LEAST_BYTES = 2**20  # smaller tensors are made as usual
MOST_BYTES = 2**28  # kept in all
MOST_SLAB = 2**28  # bytes that an arena takes from the system at once, unless one piece is larger
AHEAD_PER_TAKEN = 4  # pages touched ahead, as a multiple of the bytes taken so far
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
        self._slab, self._used, self._touched, self._taken = pages(0), 0, 0, 0
        self._largest = 0
        self._scratch = pages(0)

    def take(self, size: int, likely: int) -> Tensor:
        """Return `size` aligned bytes. Call `keep` with the number of used bytes before taking more.

        likely: about how many bytes will be used; the pages of these are touched.
        """
        self._largest = max(self._largest, size)
        if size > len(self._slab) - self._used:
            usual = max(self._taken, self._expected - self._taken)
            self._slab, self._used, self._touched = pages(max(size, min(usual, MOST_SLAB))), 0, 0
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
            self._scratch = pages(size)
        return self._scratch[:size]


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


MOST_DIM, MOST_GROUP = 512, 32  # of a head; query heads per key head, which bound the scratch memory of a thread
MOST_CONV = 16  # positions that a convolution sees
INDEX_BYTES = 32  # a panel, in the index of a matrix in 12 bits
_REINSTALL = "install the package again, and unset SPECULANT_LIBRARY if it is set."


class Type(IntEnum):
    """How weights or cached keys are stored."""

    F32 = 0
    BF16 = 1
    F16 = 2
    BF12 = 3  # packed BF16, the same numbers in 12 bits each (csrc/coded.h)
    INT8 = 4
    Q8_0 = 5  # from here to MXFP4, GGUF's blocks
    Q4_0 = 6
    Q4_1 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q4_K = 10
    Q5_K = 11
    Q6_K = 12
    IQ4_NL = 13
    MXFP4 = 14
    ZERO4 = 15  # blocks of 32: float16 scale, zero of 8 bits, integers of 4 bits as in Q4_0
    ZERO8 = 16  # the same with integers of 8 bits
    FP8 = 17  # e4m3 with a scale for each 128 inputs (csrc/fp8.h)


TYPES = {torch.float32: Type.F32, torch.bfloat16: Type.BF16}
CACHE_TYPES = {Type.F32: torch.float32, Type.BF16: torch.bfloat16, Type.INT8: torch.int8}  # of stored keys and values
SOURCES = {**TYPES, torch.float16: Type.F16}  # types of rows to pack, besides torch.uint8 for blocks
BLOCK_TYPES = {type_.name.lower(): type_ for type_ in Type if type_ >= Type.INT8}  # by layout of the rows
BLOCK_SIZES = {
    Type.Q8_0: (32, 34), Type.Q4_0: (32, 18), Type.Q4_1: (32, 20), Type.Q5_0: (32, 22), Type.Q5_1: (32, 24),
    Type.Q4_K: (256, 144), Type.Q5_K: (256, 176), Type.Q6_K: (256, 210), Type.IQ4_NL: (32, 18), Type.MXFP4: (32, 17),
    Type.ZERO4: (32, 19), Type.ZERO8: (32, 35),
}  # fmt: skip
"""Weights and bytes of a block, by type."""
SCALE_BYTES, FP8_BLOCK = 4, 128  # rows of INT8 have one scale, rows of FP8 have one before each 128 numbers


class Code(IntEnum):
    """The kinds of operations; csrc/speculant.h has the shapes."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE = 3
    ATTEND = 4
    COPY = 5
    GATE = 6
    ROUTE = 7
    EXPERTS = 8
    COMBINE = 9
    CONVOLVE = 10
    RECUR = 11


class Flag(IntFlag):
    """Variants of operations: the `SpFlag` of csrc/speculant.h."""

    NONE = 0
    ADD = 1  # LINEAR, NORM: add to the output
    GATED = 2  # LINEAR: of gate and up, which are interleaved. CONVOLVE: of b, c and x
    CENTRED = 4  # NORM, ROTATE: subtract the mean first
    ALL_HEADS = 8  # ROTATE: norm all heads together
    GATHER = 16  # EXPERTS: read the rows of the pass
    RENORMALISE = 32  # ROUTE: weights sum up to 1
    TOKENS = 64  # EMBED: look up the tokens of all rows, whatever inputs they have
    AHEAD = 128  # ATTEND: rows see later rows too
    FIXED = 256  # ATTEND: the windows of all rows of a sequence begin at one position
    SOURCE = 512  # ATTEND: rows see the positions of their sequence's source
    SCAN = 1024  # RECUR: Mamba 2
    EACH = 2048  # GATE: the input has a number for each row
    WEIGHTS = 4096  # ROUTE: scores are weights already
    ALIKE = 8192  # LINEAR: floats are summed with the same bits on all instruction sets


class Activation(IntEnum):
    """The activations of LINEAR, GATE and EXPERTS. Those from SILU to RELU have names of models/description.py."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    CLAMPED = 5  # of gate and up together: `Clamped` in models/description.py
    SIGMOID = 6


class Sizes(Structure):
    """How many items the arrays of an operation have, by their fields: the `SpSizes` of csrc/speculant.h."""

    _fields_: ClassVar[Any] = [
        ("weight", c_int64), ("scale", c_int64), ("bias", c_int64), ("key_scale", c_int64), ("key_bias", c_int64),
        ("source", c_int64), ("out", c_int64), ("copy", c_int64), ("learned", c_int64), ("sinks", c_int64),
        ("order", c_int64), ("distances", c_int64), ("matrix", c_int64), ("gates", c_int64),
    ]  # fmt: skip


class Op(Structure):
    """One operation of a program."""

    _fields_: ClassVar[Any] = [
        ("code", c_int32), ("type", c_int32), ("flags", c_int32), ("activation", c_int32),
        ("layer", c_int32), ("group", c_int32), ("n", c_int64), ("k", c_int64),
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("key_scale", c_void_p), ("key_bias", c_void_p),
        ("source", c_void_p), ("out", c_void_p), ("copy", c_void_p), ("learned", c_void_p), ("sinks", c_void_p),
        ("heads", c_int32), ("kv_heads", c_int32), ("dim", c_int32), ("window", c_int32),
        ("rope", c_int32), ("rotated", c_int32),
        ("eps", c_float), ("factor", c_float), ("softcap", c_float), ("stride", c_int64), ("used", c_int64),
        ("order", c_void_p), ("distances", c_void_p), ("before", c_int64), ("after", c_int64), ("gates", c_void_p),
        ("has", Sizes),
    ]  # fmt: skip


class Bounds(Structure):
    """What the passes of a program may have at most: the `SpBounds` of csrc/speculant.h."""

    _fields_: ClassVar[Any] = [
        ("rows", c_int64), ("tokens", c_int64), ("positions", c_int64),
        ("layers", c_int64), ("groups", c_int64), ("ropes", c_int64), ("slots", c_void_p), ("records", c_void_p),
        ("angles", c_void_p), ("head_tokens", c_void_p), ("num_head_tokens", c_int64),
    ]  # fmt: skip


class Pass(Structure):
    """The arguments of a program: the `SpPass` of csrc/speculant.h."""

    _fields_: ClassVar[Any] = [
        ("rows", c_int64), ("num_segments", c_int64), ("block", c_int64), ("groups", c_int64),
        ("tokens", c_void_p), ("positions", c_void_p), ("slots", c_void_p),
        ("segments", c_void_p), ("parents", c_void_p),
        ("angles", c_void_p), ("cosines", c_void_p), ("sines", c_void_p), ("query_factors", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("states", c_void_p), ("inputs", c_void_p),
    ]  # fmt: skip


class SpSamplingSettings(Structure):
    """`SamplingSettings` in the library's layout; the fields have the same order."""

    _fields_: ClassVar[Any] = [
        ("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("top_k", c_int64),
    ]  # fmt: skip


class SpEdits(Structure):
    """Changes to a row's logits before its distribution is computed; csrc/speculant.h has the order."""

    _fields_: ClassVar[Any] = [
        ("allowed", c_void_p), ("words", c_int64), ("masked", c_int64),
        ("biased", c_void_p), ("biases", c_void_p), ("num_biased", c_int64),
        ("banned", c_void_p), ("num_banned", c_int64), ("ban_below", c_int64),
        ("seen", c_void_p), ("counts", c_void_p), ("num_seen", c_int64),
        ("drafted", c_void_p), ("num_drafted", c_int64),
        ("penalises", c_int64), ("repetition", c_float), ("presence", c_float), ("frequency", c_float),
    ]  # fmt: skip


def settings_array(settings: Sequence[SamplingSettings]) -> ctypes.Array[SpSamplingSettings]:
    """Return settings in the library's layout."""
    return (SpSamplingSettings * len(settings)).from_buffer_copy(b"".join(map(_packed, settings)))


@functools.lru_cache(maxsize=1024)
def _packed(settings: SamplingSettings) -> bytes:
    return bytes(SpSamplingSettings(*settings))


class Draft(Structure):
    """The arguments of `Kernels.draft`: the `SpDraft` of csrc/speculant.h."""

    _fields_: ClassVar[Any] = [
        ("sequences", c_int64), ("nodes", c_int64), ("width", c_int64),
        ("limits", c_void_p), ("widths", c_void_p), ("topk", c_void_p),
        ("settings", c_void_p), ("edits", c_void_p), ("noise", c_void_p),
        ("chances", c_void_p), ("drawn", c_void_p), ("out", c_void_p),
        ("parents", c_void_p), ("scores", c_void_p), ("stop_below", c_double), ("stop_path", c_double),
        ("num_logits", c_int64), ("head_tokens", c_void_p), ("panels", c_void_p), ("num_panels", c_int64),
        ("carried", c_void_p), ("states", c_void_p), ("state_size", c_int64),
    ]  # fmt: skip


def depth_of(type_: Type, rows: Tensor) -> int:
    """Return the number of weights in each row of floats, or of blocks of a type."""
    if rows.dtype != torch.uint8:
        return rows.shape[1]
    if type_ in (Type.INT8, Type.FP8):
        scales = 1 if type_ == Type.INT8 else -(-rows.shape[1] // (FP8_BLOCK + SCALE_BYTES))
        return rows.shape[1] - SCALE_BYTES * scales
    weights, size = BLOCK_SIZES[type_]
    return rows.shape[1] // size * weights


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k], or two of them interleaved panel by panel, packed for one instruction set.

    order: int32 [k], the number of the input that each column multiplies; None = column i multiplies input i. Only
    layers with weights in groups of integers can have an order.

    alike: whether floats are summed alike on all instruction sets; integers always are.
    """

    memory: Tensor
    type: Type
    n: int
    k: int
    order: Tensor | None = None
    alike: bool = False

    @property
    def address(self) -> int:
        """The address of the first panel, or of the index if the panels are coded."""
        return self.memory.data_ptr()


@dataclass(frozen=True)
class Kernels:
    """The library with an instruction set and a number of threads."""

    library: ctypes.CDLL
    isa: str
    index: int
    threads: int
    scratch: Scratch = field(default_factory=Scratch, compare=False)

    @property
    def layout(self) -> str:
        """The layout of packed weights: only kernels with the same one can read them."""
        return f"{self.isa}, {c_int64.in_dll(self.library, 'sp_group_streams').value} streams of integers"

    def pack(self, type_: Type, weight: Tensor, second: Tensor | None = None) -> Weight:
        """Pack the rows of a matrix; with a second one of the same shape, interleaved by panels. See `pack_panels`."""
        if type_ == Type.BF12:
            return self.code(self.pack(Type.BF16, weight, second))
        n, k = len(weight), depth_of(type_, weight)
        matrices = [matrix for matrix in (weight, second) if matrix is not None]
        memory = aligned(self.packed_bytes(type_, n, k) * len(matrices))
        for lane, matrix in enumerate(matrices):
            self.pack_panels(type_, matrix, memory.data_ptr() + lane * self.packed_bytes(type_, 1, k), len(matrices))
        return Weight(memory, type_, n, k)

    def code(self, plain: Weight) -> Weight:
        """Return a packed matrix of bfloat16, or two that are interleaved, in 12 bits a weight."""
        panels = plain.memory.numel() // self.packed_bytes(Type.BF16, 1, plain.k)
        memory = aligned(self.most_coded_bytes(panels, plain.k))
        used = self.code_panels(plain.address, panels, plain.k, memory.data_ptr(), -(-INDEX_BYTES * panels // 64) * 64)
        return Weight(memory[:used].clone(), Type.BF12, plain.n, plain.k)

    def most_coded_bytes(self, panels: int, k: int) -> int:
        """Return the most bytes that panels of bfloat16 take in 12 bits a weight, the index included."""
        return -(-INDEX_BYTES * panels // 64) * 64 + panels * -(-self.packed_bytes(Type.BF16, 1, k) // 64) * 64

    def code_panels(self, plain: int, panels: int, k: int, index: int, data: int) -> int:
        """Code packed panels of bfloat16 and fill their entries of an index; `plain` and `index` are addresses.

        data: bytes from the first entry to the place of the first panel. Returns the bytes to the end of the last one.
        """
        job = self.index, self.threads, panels, k, plain, index
        end = int(self.library.sp_index_panels(*job, data))
        self.library.sp_code_panels(*job)
        return end

    def pack_panels(self, type_: Type, rows: Tensor, address: int, step: int) -> None:
        """Pack rows into every `step`-th panel, the first at an address.

        Rows are [n, k] of float32 or bfloat16 for the types F32 and BF16, float16 for F16, and uint8 [n, bytes] for
        rows of a layout (models/weights/source.py). Floats for the other types are rounded first; see `round`.
        """
        rows, k = rows.detach().contiguous(), depth_of(type_, rows)
        if type_ >= Type.INT8 and rows.dtype != torch.uint8:
            rows = self.round(type_, rows)
        source = type_ if rows.dtype == torch.uint8 else SOURCES[rows.dtype]
        self.library.sp_pack(self.index, self.threads, type_, source, rows.data_ptr(), len(rows), k, step, address)

    def round(self, type_: Type, rows: Tensor) -> Tensor:
        """Return rows [n, k] of finite floats in a layout, uint8 [n, bytes], the same on every instruction set.

        type_: one of ROUNDED (models/weights/reader.py), or INT8. If a row ends within a block, the rest of it is 0.
        """
        (n, k), source, rows = rows.shape, SOURCES[rows.dtype], rows.detach().contiguous()
        weights, size = BLOCK_SIZES.get(type_, (k, k + SCALE_BYTES))
        blocks = torch.empty(n, -(-k // weights) * size, dtype=torch.uint8)
        self.library.sp_round(self.index, self.threads, type_, source, rows.data_ptr(), n, k, blocks.data_ptr())
        return blocks

    def decode(self, type_: Type, blocks: Tensor, out: Tensor) -> None:
        """Set `out`, float32 or bfloat16 [n, k], to the numbers of rows of blocks, uint8 [n, bytes].

        type_: one of BLOCK_SIZES. The numbers are the same on every instruction set.
        """
        (n, k), blocks = out.shape, blocks.contiguous()
        job = self.index, self.threads, type_, blocks.data_ptr(), n, k
        self.library.sp_decode(*job, SOURCES[out.dtype], out.data_ptr())

    def touch(self, memory: Tensor) -> None:
        """Get the pages of new bytes from the system, with all threads; a byte of each page is set to zero."""
        self.library.sp_touch(self.index, self.threads, memory.data_ptr(), memory.numel())

    def packed_bytes(self, type_: Type, n: int, k: int) -> int:
        """Return the bytes of a packed matrix [n, k]; a matrix of one row takes a whole panel."""
        return int(self.library.sp_packed_bytes(self.index, type_, n, k))

    def check(self, ops: ctypes.Array[Op], bounds: Bounds, head: Op | None = None) -> None:
        """Raise ModelError for a program with an operation that could use memory beyond its arrays in some pass.

        bounds: of all passes. head: that of drafts; None = there are no drafts.
        """
        at, byref = c_int(), ctypes.byref
        first = None if head is None else byref(head)
        wrong = self.library.sp_check(self.index, ops, len(ops), first, byref(bounds), byref(at))
        if wrong is not None:
            op = ops[at.value] if head is None or at.value < len(ops) else head
            raise ModelError(
                f"the parts of the model do not fit together: operation {at.value}, {Code(op.code).name}, of the native"
                f" kernels would have {wrong.decode()}",
                'check config.json, or use kernels="reference" and report this as a defect.',
            )

    def run(self, ops: ctypes.Array[Op], pass_: Pass) -> None:
        """Run a program; everything that it points to must be alive."""
        self.library.sp_run(self.index, self.threads, ops, len(ops), ctypes.byref(pass_))

    def draft(self, ops: ctypes.Array[Op], head: Op, pass_: Pass, draft: Draft) -> None:
        """Run a program and draw a tree per sequence, in steps; everything that it points to must be alive."""
        byref = ctypes.byref
        self.library.sp_draft(self.index, self.threads, ops, len(ops), byref(head), byref(pass_), byref(draft))

    def probs(self, logits: Tensor, settings: Sequence[SamplingSettings], edits: int = 0) -> Tensor:
        """Return the distributions [r, V] in float64 of logits [r, V] in float32.

        edits: the address of one pointer per row, to its `SpEdits` or null. Edited rows of logits are overwritten.
        A row without a possible token is all zeros; one with a logit that is NaN or +infinity is all NaN.
        """
        logits = logits.contiguous()
        out = self.scratch.empty(*logits.shape, dtype=torch.float64)
        rows, width = logits.shape
        settings_, source, result = settings_array(settings), logits.data_ptr(), out.data_ptr()
        self.library.sp_probs(self.index, self.threads, source, rows, width, width, settings_, edits or None, result)
        return out

    def read_seconds(self, memory: Tensor) -> float:
        """Return the time to read a tensor's memory once, in seconds."""
        size = memory.numel() * memory.element_size()
        return float(self.library.sp_read(self.index, self.threads, memory.data_ptr(), size))

    def stage_items(self) -> list[int]:
        """Return the number of work items of each stage of this thread's last `run`; all threads wait after each."""
        items = array("q", bytes(8 * self.library.sp_stage_items(self.index, None, 0)))
        self.library.sp_stage_items(self.index, address(items), len(items))
        return items.tolist()

    def checksum(self, memory: Tensor) -> int:
        """Return a checksum of a tensor's memory, the same on every instruction set."""
        size = memory.numel() * memory.element_size()
        return int(self.library.sp_checksum(self.index, self.threads, memory.data_ptr(), size))


def address(items: array[int] | array[float]) -> int:
    """Return the address of an array's first item."""
    return items.buffer_info()[0]


def open_kernels(isa: str | None = None, threads: int | None = None) -> Kernels | None:
    """Return the native kernels; None if the library was not built.

    isa None = SPECULANT_ISA, else the best set of those used by default.
    Raises ConfigError for a set that this machine can't use.
    """
    library = load_library()
    if library is None:
        return None
    built = built_sets()
    usable = {each.name: each.index for each in built if each.usable}
    if not usable:
        names = ", ".join(each.name for each in built)
        raise ConfigError(f"the native kernels were built for {names}, which this processor lacks", _REINSTALL)
    defaults = (each.name for each in built if each.usable and each.by_default)
    wanted = isa or os.environ.get("SPECULANT_ISA") or next(defaults, next(iter(usable)))
    if wanted not in usable:
        is_built = any(each.name == wanted for each in built)
        why = "this machine can't run" if is_built else "the native kernels were built without"
        raise ConfigError(f"{why} the instruction set {wanted!r}", suggest(wanted, usable))
    return Kernels(library, wanted, usable[wanted], threads or torch.get_num_threads())


@dataclass(frozen=True)
class BuiltSet:
    """An instruction set of the library.

    usable: whether this machine has it. by_default: whether it is used without being named.
    """

    name: str
    index: int
    usable: bool
    by_default: bool


def built_sets() -> list[BuiltSet]:
    """Return the instruction sets of the library, the best first."""
    found, library = list[BuiltSet](), load_library()
    while library is not None and (name := library.sp_name(len(found))) is not None:
        index = len(found)
        found.append(BuiltSet(name.decode(), index, bool(library.sp_usable(index)), bool(library.sp_by_default(index))))
    return found


def usable_sets() -> list[str]:
    """Return the instruction sets that both the build and the machine have, the best first."""
    return [each.name for each in built_sets() if each.usable]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load the library once; None if it was not built. Raises ConfigError for a library of another version."""
    path = library_path()
    if path is None:
        return None
    with Converts(ConfigError, f"{path} can't be loaded as the native kernels", _REINSTALL):
        library = ctypes.CDLL(str(path))
        _check_version(library, path)  # before the rest, because another version has other functions
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def _check_version(library: ctypes.CDLL, path: Path) -> None:
    if library.sp_version() != VERSION:
        raise ConfigError(
            f"{path} is version {library.sp_version()} of the native kernels and this package needs {VERSION}",
            _REINSTALL,
        )


def library_path() -> Path | None:
    """Return the path of the library, None if it was not built; SPECULANT_LIBRARY names another build.

    Raises ConfigError if SPECULANT_LIBRARY names no file.
    """
    named = os.environ.get("SPECULANT_LIBRARY")
    path = Path(named or str(files("speculant.kernels") / "libspeculant.so"))
    if named and not path.is_file():
        raise ConfigError(f"SPECULANT_LIBRARY names {path}, which is no file", _REINSTALL)
    return path if path.is_file() else None


_MATRIX = [c_int64, c_int64]
_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("sp_version", c_int, []),
    ("sp_name", c_char_p, [c_int]),
    ("sp_usable", c_int, [c_int]),
    ("sp_by_default", c_int, [c_int]),
    ("sp_packed_bytes", c_int64, [c_int, c_int, *_MATRIX]),
    ("sp_pack", None, [c_int, c_int, c_int, c_int, c_void_p, *_MATRIX, c_int64, c_void_p]),
    ("sp_round", None, [c_int, c_int, c_int, c_int, c_void_p, *_MATRIX, c_void_p]),
    ("sp_decode", None, [c_int, c_int, c_int, c_void_p, *_MATRIX, c_int, c_void_p]),
    ("sp_index_panels", c_int64, [c_int, c_int, *_MATRIX, c_void_p, c_void_p, c_int64]),
    ("sp_code_panels", None, [c_int, c_int, *_MATRIX, c_void_p, c_void_p]),
    ("sp_touch", None, [c_int, c_int, c_void_p, c_int64]),
    ("sp_check", c_char_p, [c_int, c_void_p, c_int, c_void_p, c_void_p, c_void_p]),
    ("sp_run", None, [c_int, c_int, c_void_p, c_int, c_void_p]),
    ("sp_draft", None, [c_int, c_int, c_void_p, c_int, c_void_p, c_void_p, c_void_p]),
    ("sp_probs", None, [c_int, c_int, c_void_p, c_int64, *_MATRIX, c_void_p, c_void_p, c_void_p]),
    ("sp_draw", c_int64, [c_int, c_void_p, c_int64, c_int, c_uint64]),
    ("sp_draw_rows", None, [c_int, c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    ("sp_normalise", None, [c_int, c_void_p, c_int64, c_void_p]),
    ("sp_read", c_double, [c_int, c_int, c_void_p, c_int64]),
    ("sp_stage_items", c_int64, [c_int, c_void_p, c_int64]),
    ("sp_checksum", c_uint64, [c_int, c_int, c_void_p, c_int64]),
)


@dataclass(frozen=True)
class NativeSampler(Sampler):
    """See `Sampler`. The kernels take logits in float32 and weights in float64; the reference takes other types."""

    kernels: Kernels

    @override
    def distribution(
        self, logits: Tensor, settings: Sequence[SamplingSettings], edits: Sequence[Edits | None]
    ) -> Tensor:
        if logits.dtype == torch.float64:
            return REFERENCE.distribution(logits, settings, edits)
        if not any(edits):
            return self.kernels.probs(logits.float(), settings, 0)
        native = NativeEdits(edits)
        return self.kernels.probs(own_scores(logits, edits), settings, native.address)

    @override
    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        if weights.dtype != torch.float64:
            return REFERENCE.draw(weights, shared_noise, key)
        of, weights = self.kernels, weights.contiguous()
        return int(of.library.sp_draw(of.index, weights.data_ptr(), weights.shape[0], shared_noise, key))

    @override
    def draw_rows(self, weights: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        if weights.dtype != torch.float64:
            return REFERENCE.draw_rows(weights, draws)
        of, weights, asked = self.kernels, weights.contiguous(), array("Q", chain.from_iterable(draws))
        tokens = array("q", bytes(8 * len(draws)))
        source, width = weights.data_ptr(), weights.shape[1]
        of.library.sp_draw_rows(of.index, of.threads, source, width, address(asked), len(draws), address(tokens))
        return tokens.tolist()

    @override
    def normalise(self, weights: Tensor) -> Tensor:
        if weights.dtype != torch.float64:
            return REFERENCE.normalise(weights)
        of, weights = self.kernels, weights.contiguous()
        out = torch.empty_like(weights)
        of.library.sp_normalise(of.index, weights.data_ptr(), weights.shape[0], out.data_ptr())
        return out


class NativeEdits:
    """The edits of rows in the native kernels' layout. They point to memory that this object owns.

    address: of an array with one pointer per row; 0 if no row is edited.
    """

    def __init__(self, edits: Sequence[Edits | None]) -> None:
        self._owners: list[object] = []
        self.address = 0
        if any(edits):
            self._pointers = array("Q", [0 if own is None else self._convert(own) for own in edits])
            self.address = address(self._pointers)

    def _convert(self, edits: Edits) -> int:
        drafted, banned = array("q", edits.drafted), array("q", edits.banned)
        made = SpEdits(drafted=address(drafted), num_drafted=len(drafted), ban_below=edits.ban_below)
        made.banned, made.num_banned = address(banned), len(banned)
        if edits.mask is not None:
            made.allowed, made.words, made.masked = edits.mask.data_ptr(), len(edits.mask), 1
        if edits.biased is not None and edits.biases is not None:
            biases = array("f", edits.biases)
            made.biased, made.biases, made.num_biased = address(edits.biased), address(biases), len(biases)
            self._owners.append(biases)
        if edits.counts is not None:
            self._convert_penalties(made, edits, edits.counts)
        self._owners += (made, edits, banned, drafted)
        return ctypes.addressof(made)

    def _convert_penalties(self, made: SpEdits, edits: Edits, counts: TokenCounts) -> None:
        tokens, numbers = counts.tokens, counts.counts
        made.seen, made.counts, made.num_seen = tokens.data_ptr(), numbers.data_ptr(), len(tokens)
        made.penalises, made.repetition = 1, edits.repetition
        made.presence, made.frequency = edits.presence, edits.frequency
        self._owners += (tokens, numbers)
