"""How long a pass of one row takes with weights in each type, estimated before a model is loaded.

A pass of one row reads every weight once. So its time is the sum, over the matrices, of their bytes times the seconds
per byte of their types. These seconds are measured once on this machine, on random matrices that are read from memory.
They include the time of arithmetic, where this is slower than memory.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
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
from speculant.models.description import DecoderConfig
from speculant.models.native.ops import linear
from speculant.models.sizes import pass_matrices
from speculant.models.weights.packings import timed_bytes
from speculant.models.weights.reader import WeightTypes
from speculant.models.weights.rounding import Rounding
from speculant.models.weights.source import WeightSource

Kind = tuple[Type, int]  # of a matrix: its type and its depth k

DISTINCT = 2  # panels of random weights; the others repeat them
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
) -> dict[Kind, int]:
    """Return how many bytes a pass of one row reads, by type, with the depth that has the most bytes of the type."""
    found = defaultdict[Type, Counter[int]](Counter)
    for name, (n, k), share in pass_matrices(config):
        type_ = types.of(name) if rounding is None else rounding.type_of(name, k)
        found[type_][k] += round(share * likely_bytes(kernels, type_, n, k))
    return {(type_, depths.most_common(1)[0][0]): depths.total() for type_, depths in found.items()}


def kept_speeds(kernels: Kernels, kinds: Collection[Kind]) -> dict[Kind, float]:
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


def measure_speeds(kernels: Kernels, kinds: Collection[Kind]) -> tuple[list[float], float]:
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


def _run(kernels: Kernels, kind: Kind, memory: Tensor, x: Tensor, out: Tensor) -> tuple[ctypes.Array[Op], int]:
    """Return operations that multiply a row by copies of a matrix, which fill `memory`, and the bytes of the copies."""
    panels = _random_panels(kernels, *kind)
    size = -(-len(panels.memory) // ALIGNMENT) * ALIGNMENT
    places = range(-memory.data_ptr() % ALIGNMENT, len(memory) - size + 1, size)
    copies = [memory[place : place + len(panels.memory)].copy_(panels.memory) for place in places]
    ops = [linear(replace(panels, memory=copy), x[:, : panels.k], out[:, : panels.n]) for copy in copies]
    return (Op * len(ops))(*ops), size * len(ops)


def _random_panels(kernels: Kernels, type_: Type, k: int) -> Weight:
    """Return a packed matrix of about MATRIX_BYTES of random weights."""
    height = DISTINCT * panel_rows(kernels)
    rows = torch.randn(height, k, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    if type_ == Type.F16:
        rows = rows.half()
    few = Packer(kernels, torch.bfloat16, Arena(kernels.touch)).pack(type_, height, k, [[lambda: rows]])
    times = max(1, MATRIX_BYTES // len(few.memory))
    return Weight(few.memory.repeat(times), type_, times * height, k)
