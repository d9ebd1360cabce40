"""States in the native kernels: equal to a plain loop, and in every bit the same however their rows were computed.

Shapes have parts of vectors, several tiles of columns and several heads for a key. Records begin as NaN: what a pass
does not write is never read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speculant.cache import MOST_PENDING, NO_RECORD, StateRows, StateShape
from speculant.errors import ModelError
from speculant.kernels import Bounds, Code, Kernels, Op, Pass, Sizes, address
from speculant.models import Norm, PackedNorm, State, StateVectors, recurring, state_shape
from tests.native import SETS, kernels, needs_kernels, on, random

__all__ = ["kernels"]
pytestmark = needs_kernels
EPS = 1e-6
LENGTH = 40


def delta(heads: int, key_heads: int, key_dim: int, head_dim: int, conv: int = 4, normed: bool = True) -> State:
    width = 2 * key_heads * key_dim + heads * head_dim
    return State(width, conv, heads, key_heads, key_dim, head_dim, Norm(EPS) if normed else None, conv_bias=conv == 2)


def mamba(of: State, least: float = 0.0, most: float = math.inf) -> State:
    return replace(of, steps=(least, most), conv_bias=True)


KINDS = {
    "small": delta(4, 2, 8, 8),
    "odd": delta(6, 2, 5, 19, conv=2),
    "wide": delta(2, 2, 16, 136, conv=3, normed=False),
    "usual": delta(2, 1, 128, 128),
    "short": State(37, 3),
    "short, several parts": State(2050, 4, conv_bias=True),
    "mamba": mamba(delta(4, 1, 8, 8)),
    "mamba, odd": mamba(delta(6, 2, 5, 19, conv=2), 0.3, 1.0),
    "mamba, wide": mamba(delta(3, 3, 16, 136, conv=3, normed=False)),
    "mamba, usual": mamba(delta(4, 1, 128, 64)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Layer:
    """A layer with random weights, the rows of some sequences, and records."""

    def __init__(self, of: State, records: int = 6, sequences: int = 1, seed: int = 0) -> None:
        self.of, self.shape = of, state_shape(of)
        heads = of.heads or None
        self.vectors = StateVectors(
            random(of.conv, of.width, seed=seed + 1), random(of.width, seed=seed + 2) if of.conv_bias else None,
            heads and -random(heads, seed=seed + 3).exp(), heads and random(heads, seed=seed + 4),
            PackedNorm(of.norm, 1 + random(of.normed_size, seed=seed + 5) / 4, None) if of.norm else None,
            heads and random(heads, seed=seed + 7) if of.steps else None,
        )  # fmt: skip
        self.rows = random(sequences, LENGTH, sum(of.projections.values()), seed=seed + 6)
        self.records = torch.full((records, self.shape.size), math.nan)

    def ops(self, source: Tensor, columns: Tensor, out: Tensor) -> list[Op]:
        return [*recurring(self.of, 1, self.vectors, source, columns if self.of.heads else None, out)]

    def run(self, kernels: Kernels, *parts: tuple[int, int, int, StateRows]) -> list[Tensor]:
        """Run a pass over rows start .. end - 1 of sequences, and return the results of each."""
        counts = [end - start for _, start, end, _ in parts]
        source = torch.cat([self.rows[sequence, start:end] for sequence, start, end, _ in parts])
        columns, out = (
            torch.full((len(source), self.of.width), math.nan),
            torch.full((len(source), self.of.size), math.nan),
        )
        fields = list[int]()
        for first, (_, start, end, own) in zip(accumulate(counts, initial=0), parts, strict=False):
            fields += (first, end - start, start, end - start, -1, 0, 0, 0, 0, 0, *own)
        segments, states = array("q", fields), array("Q", [0, self.records.data_ptr()])
        ops = self.ops(source, columns, out)
        on = Pass(rows=len(source), num_segments=len(parts), segments=address(segments), states=address(states))
        kernels.run((Op * len(ops))(*ops), on)
        return list(out.split(counts))

    def state(self, record: int) -> Tensor:
        return self.records[record, : self.shape.state].clone()


class Text:
    """A sequence that goes from pass to pass: it has two records, one after the other."""

    def __init__(self, layer: Layer, kernels: Kernels, records: tuple[int, int] = (0, 1), number: int = 0) -> None:
        self.layer, self.kernels, self.records, self.number = layer, kernels, records, number
        self.read, self.settled, self.length = NO_RECORD, 0, 0

    def part(self, rows: int, certain: int, **saving: int) -> tuple[int, int, int, StateRows]:
        start, self.length = self.length, self.length + rows
        if not certain and self.read != NO_RECORD:
            return self.number, start, self.length, StateRows(self.read, self.settled, NO_RECORD, 0, **saving)
        read, settled = self.read, self.settled
        self.read, self.settled = self.records[self.read == self.records[0]], start + certain
        return self.number, start, self.length, StateRows(read, settled, self.read, certain, **saving)

    def advance(self, rows: int, certain: int, **saving: int) -> Tensor:
        return self.layer.run(self.kernels, self.part(rows, certain, **saving))[0]

    def chunks(self, sizes: Iterable[int]) -> Tensor:
        return torch.cat([self.advance(size, size) for size in sizes])


def whole(layer: Layer, kernels: Kernels, end: int = LENGTH, number: int = 0) -> Tensor:
    return Text(layer, kernels, (4, 5), number).advance(end, end)


def expected(layer: Layer, number: int = 0) -> tuple[Tensor, Tensor]:
    """Compute a sequence in float64, one row after the other, and return its results and its last state."""
    of, rows, vectors = layer.of, layer.rows[number].double(), layer.vectors
    columns = rows[:, of.first_column :][:, : of.width]
    if not of.heads:
        before, after, columns = rows.chunk(3, dim=1)
        columns = before * columns
    padded = torch.cat([columns.new_zeros(of.conv - 1, of.width), columns])
    convolved = sum(weight * padded[j : j + LENGTH] for j, weight in enumerate(vectors.conv.double()))
    convolved = convolved + (0 if vectors.conv_bias is None else vectors.conv_bias.double())
    if not of.heads:
        return after * convolved, columns.new_zeros(0)
    if of.steps:
        return scanned(layer, rows[:, : of.size], functional.silu(convolved), rows[:, -of.heads :])
    query, key, value = functional.silu(convolved).split((of.key_size, of.key_size, of.size), dim=1)
    z, b, a = rows[:, of.width :].split((of.size, of.heads, of.heads), dim=1)
    query, key = (
        each.view(LENGTH, of.key_heads, of.key_dim).repeat_interleave(of.heads // of.key_heads, 1)
        for each in (query, key)
    )
    query, key = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (query, key))
    value, z = (each.reshape(LENGTH, of.heads, of.head_dim) for each in (value, z))
    decay = (vectors.rates.double() * functional.softplus(a + vectors.rate_bias.double())).exp()
    state, results = columns.new_zeros(of.heads, of.key_dim, of.head_dim), list[Tensor]()
    for row in range(LENGTH):
        state = state * decay[row, :, None, None]
        d = b[row].sigmoid()[:, None] * (value[row] - torch.einsum("hkv,hk->hv", state, key[row]))
        state = state + torch.einsum("hk,hv->hkv", key[row], d)
        results.append(torch.einsum("hkv,hk->hv", state, query[row]) / of.key_dim**0.5)
    result = torch.stack(results)
    if vectors.norm:
        result = result * (result.square().mean(-1, keepdim=True) + EPS).rsqrt() * vectors.norm.scale.double()
    return (result * functional.silu(z)).flatten(1), state.flatten()


def scanned(layer: Layer, z: Tensor, convolved: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Mamba 2 in float64 from gates, convolved rows and rates, and return its results and its last state."""
    of, vectors = layer.of, layer.vectors
    value, key, query = convolved.split((of.size, of.key_size, of.key_size), dim=1)
    query, key = (
        each.view(LENGTH, of.key_heads, of.key_dim).repeat_interleave(of.heads // of.key_heads, 1)
        for each in (query, key)
    )
    value = value.view(LENGTH, of.heads, of.head_dim)
    time = functional.softplus(a + vectors.rate_bias.double()).clamp(*of.steps)
    state, results = value.new_zeros(of.heads, of.key_dim, of.head_dim), list[Tensor]()
    for row in range(LENGTH):
        state = state * (vectors.rates.double() * time[row]).exp()[:, None, None]
        state = state + torch.einsum("hk,hv->hkv", key[row], time[row, :, None] * value[row])
        results.append(torch.einsum("hkv,hk->hv", state, query[row]) + vectors.skip.double()[:, None] * value[row])
    result = torch.stack(results).flatten(1) * functional.silu(z)
    if vectors.norm:
        parts = result.unflatten(1, (of.key_heads, -1))
        result = (parts * (parts.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(1)
        result = result * vectors.norm.scale.double()
    return result, state.flatten()


@every_kind
def test_the_results_are_those_of_a_plain_loop(kernels: Kernels, kind: str) -> None:
    layer = Layer(KINDS[kind])
    found, (result, state) = whole(layer, kernels), expected(layer)
    assert torch.allclose(found.double(), result, rtol=2e-5, atol=2e-5)
    assert torch.allclose(layer.state(4).double(), state, rtol=2e-5, atol=2e-6)


@every_kind
def test_every_set_and_number_of_threads_gives_the_same_bits(kind: str) -> None:
    """Of convolutions, recurrences and norms alike."""
    found = list[tuple[Tensor, Tensor]]()
    for isa in SETS:
        for threads in (1, 2):
            layer = Layer(KINDS[kind])
            found.append((whole(layer, on(isa, threads)), layer.records[4]))
    for result, record in found:
        assert torch.equal(result, found[0][0])
        assert torch.equal(record.nan_to_num(), found[0][1].nan_to_num())


CHUNKINGS = [[1] * LENGTH, [2] * 20, [7, 1, 16, 5, 11], [17, 23], [39, 1], [1, 39]]


@every_kind
def test_any_chunks_give_the_same_bits(kernels: Kernels, kind: str) -> None:
    layer = Layer(KINDS[kind])
    at_once = whole(layer, kernels)
    for sizes in CHUNKINGS:
        last = Text(layer, kernels)
        assert torch.equal(last.chunks(sizes), at_once), sizes
        assert torch.equal(layer.state(last.read), layer.state(4)), sizes


@every_kind
def test_sequences_do_not_change_one_another(kernels: Kernels, kind: str) -> None:
    layer = Layer(KINDS[kind], records=8, sequences=2)
    alone = [whole(layer, kernels, number=number) for number in (0, 1)]
    both = [Text(layer, kernels, (0, 1), 0), Text(layer, kernels, (2, 3), 1)]
    found = [
        [*layer.run(kernels, both[0].part(*one), both[1].part(*other))]
        for one, other in (((1, 1), (9, 9)), ((3, 1), (4, 2)))
    ]
    for number, results in enumerate(zip(*found, strict=True)):
        result = torch.cat(results)
        assert torch.equal(result, alone[number][: len(result)])


def draft(rows: int) -> Callable[[Text], list[Tensor]]:
    """Return a pass of a certain row and drafted ones."""
    return lambda sequence: [sequence.advance(1 + rows, 1)]


def grow(rows: int) -> Callable[[Text], list[Tensor]]:
    """Return passes of a certain row, and of one drafted row each."""
    return lambda sequence: [sequence.advance(1, 1), *(sequence.advance(1, 0) for _ in range(rows))]


@every_kind
@pytest.mark.parametrize("way", [draft, grow])
def test_drafts_may_be_rejected_at_every_length(
    kernels: Kernels, kind: str, way: Callable[[int], Callable[[Text], list[Tensor]]]
) -> None:
    """Accepted rows give the bits of rows that are computed one after the other; rejected rows leave nothing behind."""
    layer = Layer(KINDS[kind])
    at_once = whole(layer, kernels)
    rejected = layer.rows.clone()
    for drafted in (1, 3, MOST_PENDING - 1):
        for accepted in range(drafted + 1):
            sequence, end = Text(layer, kernels), 5 + 1 + accepted
            sequence.advance(5, 5)
            layer.rows[:, end:] = random(LENGTH - end, layer.rows.shape[2], seed=accepted)
            first = torch.cat(way(drafted)(sequence))
            assert torch.equal(first[: 1 + accepted], at_once[5:end])
            layer.rows.copy_(rejected)
            sequence.length = end
            again = [sequence.advance(3, 1), sequence.advance(1, 0)]
            sequence.length -= 2
            again.append(sequence.advance(LENGTH - sequence.length, LENGTH - sequence.length))
            assert torch.equal(again[0], at_once[end : end + 3])
            assert torch.equal(again[1], at_once[end + 3 : end + 4])
            assert torch.equal(again[2], at_once[end + 2 :])
            assert torch.equal(layer.state(sequence.read), layer.state(4))


@every_kind
def test_a_saved_record_is_that_of_a_pass_that_ended_there(kernels: Kernels, kind: str) -> None:
    """Within the updates that wait, at both ends of them, and within the certain rows."""
    layer = Layer(KINDS[kind])
    at_once = whole(layer, kernels)
    for saved in range(3, 14):
        sequence = Text(layer, kernels)
        sequence.advance(3, 3)
        sequence.advance(5, 0)
        layer.records[2] = math.nan
        sequence.advance(6, 5 if saved < 14 else 6, save=2, saved=saved)
        resumed = Text(layer, kernels, (2, 3))
        resumed.read, resumed.settled, resumed.length = 2, saved, saved
        assert torch.equal(resumed.advance(LENGTH - saved, LENGTH - saved), at_once[saved:]), saved


def test_a_state_begins_again_at_position_0(kernels: Kernels) -> None:
    """Whatever a record holds, and though its updates wait."""
    layer = Layer(KINDS["odd"])
    at_once = whole(layer, kernels)
    layer.run(kernels, (0, 0, 2, StateRows(NO_RECORD, 0, 0, 0)))
    layer.records[0, : layer.shape.state] = math.nan
    assert torch.equal(layer.run(kernels, (0, 2, 9, StateRows(0, 0, 1, 7)))[0], at_once[2:9])
    assert torch.equal(layer.run(kernels, (0, 0, 9, StateRows(0, 0, 1, 9)))[0], at_once[:9])


def checked(layer: Layer, kernels: Kernels, ops: Sequence[Op], record: int, rows: int = 4) -> None:
    records = array("q", [0, record])
    kernels.check((Op * len(ops))(*ops), Bounds(rows=rows, layers=2, groups=1, records=address(records)))


@pytest.mark.parametrize("kind", ["odd", "short, several parts", "mamba, odd"])
def test_hostile_programs_are_refused(kind: str) -> None:
    layer, one = Layer(KINDS[kind]), on()
    source, columns, out = (torch.empty(4, width) for width in (layer.rows.shape[2], layer.of.width, layer.of.size))
    ops = layer.ops(source, columns, out)
    checked(layer, one, ops, layer.shape.size)
    for record in (layer.shape.size - 1, layer.shape.size + 1, 0):
        with pytest.raises(ModelError, match="states other than those of the cache"):
            checked(layer, one, ops, record)
    with pytest.raises(ModelError, match="operation 0, CONVOLVE"):
        checked(layer, one, ops, layer.shape.size, rows=5)
    for op in ops:
        for field, _ in Sizes._fields_:
            has = getattr(op.has, field)
            setattr(op.has, field, 0 if field == "source" else has - 1)  # the rows of a source have gaps
            if has:
                with pytest.raises(ModelError, match=Code(op.code).name):
                    checked(layer, one, ops, layer.shape.size)
            setattr(op.has, field, has)
        for field in ("layer", "n", "window", "stride", *(("k", "heads", "kv_heads", "dim") if layer.of.heads else ())):
            known = getattr(op, field)
            for other in (known + 1000, -1, -(2**31), 2**31 - 1):
                setattr(op, field, other)
                with pytest.raises(ModelError, match=Code(op.code).name):
                    checked(layer, one, ops, layer.shape.size)
                setattr(op, field, known)


def test_the_shape_of_a_record_is_that_of_the_kernels() -> None:
    """See `StateShape`; csrc/states.h has it too."""
    assert state_shape(KINDS["odd"]) == StateShape(6 * 5 * 19, 2 * 5 + 6 * 20, 2 * 2 * 5 + 6 * 19, 2)
