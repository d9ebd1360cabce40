"""Times matrices of each type on this machine, before a model is loaded.

Packings: bfloat16 weights are stored as they are, or in 12 bits each (csrc/coded.h). Both hold the same numbers and
give the same bits, so the choice is one of speed and memory alone. Fewer bytes are faster if a pass waits for memory.
Both are timed, on matrices of the model's depths.

Types: a pass of one row reads every weight once. So its time is the sum, over the matrices, of their bytes times the
seconds per byte of their types. These seconds are measured once on this machine, on random matrices that are read from
memory. They include the time of arithmetic, where this is slower than memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from speculant.files import BUSY_KEPT_S, Run, costs_folder, key_of, read_measured, spread_of, write_file
from speculant.kernels import (
    ALIGNMENT,
    Arena,
    Kernels,
    Op,
    Packer,
    Pass,
    Type,
    Weight,
    aligned,
    likely_bytes,
    panel_rows,
)
from speculant.models.backends.base import AS_STORED, CODED, PLAIN, Packing
from speculant.models.description import DecoderConfig
from speculant.models.native.packed import linear
from speculant.models.sizes import matrix_weights, pass_matrices
from speculant.models.weights.reader import Rounding, WeightTypes
from speculant.models.weights.source import WeightSource

MIB = 2**20
LEAST_CODED_BYTES = 64 * MIB  # of a model: the weights of a smaller one may stay in the processor's caches
TIMED_BYTES = 64 * MIB  # that are read in turn; more if the caches are large
MOST_TIMED_BYTES = 512 * MIB
ROWS = (1, 5, 8)  # of plain decoding, of four drafted tokens, and of several sequences
LAYER_BYTES = 8 * MIB
SECONDS = 0.06  # after which no further round of runs begins
LEAST_GAIN = 1.03  # at one row
LEAST_ELSEWHERE = 0.97

Times = dict[tuple[str, int], dict[int, list[Run]]]  # runs by packing, rows and depth


def fastest_packing(
    kernels: Kernels, config: DecoderConfig, quantization: str | None, weights: WeightSource | None = None
) -> Packing:
    """Return the faster way to store a model's bfloat16 weights here; takes some tenths of a second the first time.

    weights: those of the model; None = all are bfloat16.
    """
    if quantization is not None:
        return Packing(PLAIN, f"its linear layers are {quantization}")
    size = 2 * (matrix_weights(config) if weights is None else narrow_weights(config, weights))  # bytes
    if not size:
        return AS_STORED
    if size < LEAST_CODED_BYTES:
        return Packing(PLAIN, f"{size / MIB:.0f} MiB of weights may stay in the processor's caches")
    depths = sorted({config.hidden_size, *(layer.mlp.size for layer in config.layers)})
    return choose(kept_gains(kernels, depths, min(size, timed_bytes())))


def narrow_weights(config: DecoderConfig, weights: WeightSource) -> int:
    """Return how many weights a pass of a bfloat16 model reads in bfloat16; others may be in blocks."""
    types = WeightTypes(weights, torch.bfloat16)
    return sum(math.prod(shape) for name, shape, _ in pass_matrices(config) if types.of(name) == Type.BF16)


def kept_gains(kernels: Kernels, depths: Sequence[int], num_bytes: int) -> dict[int, float]:
    """Return the gains of an earlier start, or measure and keep them; unsteady ones are kept only for a while."""
    facts = ["gains", kernels.isa, str(kernels.threads), str(depths), str(num_bytes)]
    path = costs_folder() / f"{key_of(facts)}.packing.json"
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        kept = read_measured(path, BUSY_KEPT_S)["gains"]
        gains = {rows: float(kept[str(rows)]) for rows in ROWS}
        if all(0 < gain < math.inf for gain in gains.values()):
            return gains
    times = time_packings(kernels, depths, num_bytes)
    gains = gains_of(times)
    write_file(
        path, {"gains": gains, "spread": spread_of(runs for layers in times.values() for runs in layers.values())}
    )
    return gains


def choose(gains: Mapping[int, float]) -> Packing:
    """Return the better packing for the speeds of coded weights over plain ones, by rows; 1 must be among them."""
    pays = gains[1] >= LEAST_GAIN and min(gains.values()) >= LEAST_ELSEWHERE
    found = ", ".join(f"{gain:.2f} x at {rows} row{'s' if rows > 1 else ''}" for rows, gain in gains.items())
    return Packing(CODED if pays else PLAIN, f"12 bits are {found} as fast as plain here")


def timed_bytes() -> int:
    """Return how many bytes to read so that the caches do not hold them."""
    caches = 0
    with suppress(ValueError, OSError):
        caches = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    return min(max(TIMED_BYTES, 2 * caches), MOST_TIMED_BYTES)


def gains_of(times: Times) -> dict[int, float]:
    """Return the gains, by rows, of the best times: other programs may delay most runs, but rarely all."""
    best = {key: sum(min(runs).elapsed_s for runs in layers.values()) for key, layers in times.items()}
    return {rows: best[PLAIN, rows] / best[CODED, rows] for rows in ROWS}


def time_packings(kernels: Kernels, depths: Sequence[int], num_bytes: int) -> Times:
    """Return the seconds of linear layers in both packings, by rows, of all runs at each depth.

    There are small layers of all depths, with `num_bytes` of plain weights together, so that each is read from memory.
    """
    count = max(1, num_bytes // (len(depths) * LAYER_BYTES))
    plain = [_random_weight(kernels, Type.BF16, depth, 8, LAYER_BYTES) for depth in depths]
    layers = {
        PLAIN: _copies(kernels, plain, count),
        CODED: _copies(kernels, [kernels.code(each) for each in plain], count),
    }
    x, out = torch.randn(max(ROWS), max(depths)), torch.empty(max(ROWS), max(each.n for each in plain))
    programs = {name: [(Op * 1)(linear(each, x, out)) for each in own] for name, own in layers.items()}
    seconds: Times = {(name, rows): {depth: [] for depth in depths} for rows in ROWS for name in layers}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for (name, rows), times in seconds.items():
            for layer, program in zip(layers[name], programs[name], strict=True):
                times[layer.k].append(Run.of(partial(kernels.run, program, Pass(rows=rows))))
    return seconds


def _random_weight(kernels: Kernels, type_: Type, k: int, panels: int, size: int) -> Weight:
    """Return a packed matrix of about `size` bytes, of random weights with the exponents of trained ones.

    panels: how many differ; the others repeat them.
    """
    height = panels * panel_rows(kernels)
    rows = torch.randn(height, k, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    rows = rows.half() if type_ == Type.F16 else rows
    few = Packer(kernels, torch.bfloat16, Arena(kernels.touch)).pack(type_, height, k, [[lambda: rows]])
    times = max(1, size // len(few.memory))
    memory = aligned(times * len(few.memory))
    memory.view(times, -1).copy_(few.memory)
    return Weight(memory, type_, times * height, k)


def _copies(kernels: Kernels, weights: Sequence[Weight], count: int) -> list[Weight]:
    """Return copies of weights, each in memory of its own."""
    arena = Arena(kernels.touch)

    def copy(weight: Weight) -> Weight:
        size = len(weight.memory)
        return replace(weight, memory=arena.keep(arena.take(size, size), size).copy_(weight.memory))

    return [copy(weight) for weight in weights for _ in range(count)]


_Kind = tuple[Type, int]  # of a matrix: its type and its depth k

MATRIX_BYTES = 2**22
RUNS = 6  # of which the best counts: other programs only add time


def row_seconds(
    kernels: Kernels,
    config: DecoderConfig,
    weights: WeightSource,
    dtype: torch.dtype,
    roundings: Sequence[Rounding | None],
) -> list[float]:
    """Estimate the seconds of a pass of one row, without those of attention, in each of some types.

    roundings: the types that weights are rounded to; None = they are not.
    """
    found = [_bytes_by_kind(kernels, config, WeightTypes(weights, dtype), rounding) for rounding in roundings]
    speeds = kept_speeds(kernels, {kind for each in found for kind in each})
    return [sum(count * speeds[kind] for kind, count in each.items()) for each in found]


def _bytes_by_kind(
    kernels: Kernels, config: DecoderConfig, types: WeightTypes, rounding: Rounding | None
) -> dict[_Kind, int]:
    """Return how many bytes a pass of one row reads, by type, with the depth that has the most bytes of the type."""
    found = defaultdict[Type, Counter[int]](Counter)
    for name, (n, k), share in pass_matrices(config):
        type_ = types.of(name) if rounding is None else rounding.type_of(name, k)
        found[type_][k] += round(share * likely_bytes(kernels, type_, n, k))
    return {(type_, depths.most_common(1)[0][0]): depths.total() for type_, depths in found.items()}


def kept_speeds(kernels: Kernels, kinds: Collection[_Kind]) -> dict[_Kind, float]:
    """Return the seconds per byte of matrices, from disk if they were measured before."""
    facts = ["speeds", kernels.isa, kernels.layout, str(kernels.threads)]
    path = costs_folder() / f"{key_of(facts)}.speeds.json"
    names = {f"{type_.name} {k}": (type_, k) for type_, k in kinds}
    kept, spread = dict[str, float](), 1.0
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        read = read_measured(path, BUSY_KEPT_S)
        kept = {str(name): float(own) for name, own in read["seconds"].items() if 0 < float(own) < math.inf}
        spread = float(read["spread"])
    if missing := {name: kind for name, kind in names.items() if name not in kept}:
        seconds, own = measure_speeds(kernels, missing.values())
        kept |= dict(zip(missing, seconds, strict=True))
        write_file(path, {"seconds": kept, "spread": max(spread, own)})
    return {kind: kept[name] for name, kind in names.items()}


def measure_speeds(kernels: Kernels, kinds: Collection[_Kind]) -> tuple[list[float], float]:
    """Return the seconds per byte in a pass of one row, for matrices of each kind, and the spread of the runs.

    All kinds are timed in turn, so that other programs slow down all of them. Their memory together is too large for
    the processor's caches.
    """
    memory = aligned(timed_bytes()).chunk(len(kinds))
    x, out = torch.randn(1, max(k for _, k in kinds)), torch.empty(1, MATRIX_BYTES)
    programs = [_run(kernels, kind, own, x, out) for kind, own in zip(kinds, memory, strict=True)]
    runs: list[list[Run]] = [[] for _ in programs]
    for _ in range(RUNS):
        for own, (ops, _) in zip(runs, programs, strict=True):
            own.append(Run.of(partial(kernels.run, ops, Pass(rows=1))))
    best = [min(own).elapsed_s / size for own, (_, size) in zip(runs, programs, strict=True)]
    return best, spread_of(runs)


def _run(kernels: Kernels, kind: _Kind, memory: Tensor, x: Tensor, out: Tensor) -> tuple[ctypes.Array[Op], int]:
    """Return operations that multiply a row by copies of a matrix, which fill `memory`, and the bytes of the copies."""
    panels = _random_weight(kernels, *kind, 2, MATRIX_BYTES)
    size = -(-len(panels.memory) // ALIGNMENT) * ALIGNMENT
    places = range(-memory.data_ptr() % ALIGNMENT, len(memory) - size + 1, size)
    copies = [memory[place : place + len(panels.memory)].copy_(panels.memory) for place in places]
    ops = [linear(replace(panels, memory=copy), x[:, : panels.k], out[:, : panels.n]) for copy in copies]
    return (Op * len(ops))(*ops), size * len(ops)
