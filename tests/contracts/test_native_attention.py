"""Attention of the native kernels: every node of a tree has the bits of its path fed as a chain, on every set."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from speculant.cache import NO_RECORD, SCALE_BYTES, read_heads, round_heads
from speculant.kernels import Code, Flag, Kernels, Op, Pass, Type, address, reference
from tests.examples import examples
from tests.native import SETS, needs_kernels, on
from tests.timing import cpu_seconds

pytestmark = needs_kernels
TYPES = {Type.F32: torch.float32, Type.BF16: torch.bfloat16, Type.INT8: torch.int8}
NO_STATES = (NO_RECORD, 0, NO_RECORD, 0, NO_RECORD, 0)
SOURCE, FIELDS = 8, 16  # of a segment: where its source is, and how many there are
WIDE = [-1] * 5 + [node // 3 for node in range(42)]  # 47 nodes, five at the root and three below each
COMB = [-1, *(node for step in range(30) for node in (2 * step, 2 * step))]  # a path of 31, with a sibling at each node


TREES = st.lists(st.one_of(st.integers(0, 2), st.integers(0, 30)), max_size=40).map(
    lambda backwards: [max(-1, node - 1 - back) for node, back in enumerate(backwards)]
)  # a node follows one of those before it, or the root


@dataclass(frozen=True)
class Shape:
    """What attention is computed over: heads, and how the cache holds their keys and values."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    window: int = 0
    block: int = 16
    type: Type = Type.F32
    softcap: float = 0.0
    sinks: bool = False
    flags: Flag = Flag.NONE
    before: int = 0  # distances
    after: int = 0

    @property
    def distances(self) -> Tensor | None:
        """The number of each head and distance [heads, before + 1 + after]; None = there are none."""
        generator = torch.Generator().manual_seed(5)
        return 3 * torch.randn(self.heads, self.before + 1 + self.after, generator=generator) if self.before else None

    @property
    def sink_scores(self) -> Tensor:
        """The score of each head's sink; no sinks = -infinity."""
        return torch.linspace(-3.0, 9.0, self.heads) if self.sinks else torch.full((self.heads,), -torch.inf)


@dataclass(frozen=True)
class Rows:
    """One sequence's rows: `chain` tokens behind a cache of `start` positions, then a tree of `parents`.

    source: the positions of its source, which rows see instead of their sequence; 0 = it has none.
    """

    start: int
    chain: int
    parents: Sequence[int] = ()
    source: int = 0

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.chain + len(self.parents)

    def path(self, node: int) -> list[int]:
        """Return the rows, within the sequence, of the chain and a node's ancestors and itself."""
        path: list[int] = []
        while node >= 0:
            path.append(self.chain + node)
            node = self.parents[node]
        return [*range(self.chain), *reversed(path)]

    def leaves(self) -> list[int]:
        """Return the nodes without children; the root if there are none."""
        return sorted(set(range(len(self.parents))) - set(self.parents)) or [-1]


@dataclass(frozen=True)
class Fed:
    """One sequence with its queries, keys and values: [positions, heads, dim] in order of their places."""

    rows: Rows
    queries: Tensor  # [count, heads, dim]
    keys: Tensor  # [start + count, kv_heads, dim], or those of the source
    values: Tensor

    def along(self, node: int) -> Fed:
        """Return the path to a node as a chain."""
        path, start, source = self.rows.path(node), self.rows.start, self.rows.source
        places = [*range(source)] if source else [*range(start), *(start + row for row in path)]
        rows = Rows(start, len(path), source=source)
        return Fed(rows, self.queries[path], self.keys[places], self.values[places])


def make(shape: Shape, rows: Rows, seed: int = 0) -> Fed:
    generator = torch.Generator().manual_seed(seed)
    places, dtype = rows.source or rows.start + rows.count, TYPES[shape.type]
    queries = 2 * torch.randn(rows.count, shape.heads, shape.dim, generator=generator)
    keys, values = (torch.randn(places, shape.kv_heads, shape.dim, generator=generator) for _ in range(2))
    if shape.type == Type.INT8:
        return Fed(rows, queries, *(read_heads(round_heads(each), torch.float32) for each in (keys, values)))
    return Fed(rows, queries, keys.to(dtype), values.to(dtype))


class Attention:
    """Attention of several sequences in one pass; their blocks lie scattered in the cache.

    Block tables have two groups, of which the second is used.
    """

    GROUP = 1

    def __init__(self, shape: Shape, fed: Sequence[Fed]) -> None:
        self.counts = [each.rows.count for each in fed]
        self._store(shape, fed)
        self._segments, self._parents = array("q"), array("q")
        for place, each in enumerate(fed):
            rows, tree = each.rows, len(self._parents) if each.rows.parents else -1
            first, table = sum(self.counts[:place]), self._tables[place]
            source = table[self.GROUP].data_ptr() if rows.source else 0
            own = (0, 0) if rows.source else (table.data_ptr(), table.shape[1])
            self._segments.extend(
                (first, rows.count, rows.start, rows.chain, tree, *own, 0, source, rows.source, *NO_STATES)
            )
            self._parents.extend(rows.parents)
        self._inputs = torch.full((sum(self.counts), shape.heads + 2 * shape.kv_heads, shape.dim), torch.nan)
        self._inputs[:, : shape.heads] = torch.cat([each.queries for each in fed])
        self.out = torch.full((sum(self.counts), shape.heads, shape.dim), torch.nan)
        self._sinks, self._distances = shape.sink_scores, shape.distances
        flags = shape.flags | (Flag.SOURCE if fed[0].rows.source else Flag.NONE)
        op = Op(
            code=Code.ATTEND, type=shape.type, heads=shape.heads, kv_heads=shape.kv_heads, dim=shape.dim,
            window=shape.window, factor=shape.dim**-0.5, softcap=shape.softcap, group=self.GROUP, flags=flags,
            sinks=self._sinks.data_ptr() if shape.sinks else None, source=self._inputs.data_ptr(),
            distances=None if self._distances is None else self._distances.data_ptr(), before=shape.before,
            after=shape.after, out=self.out.data_ptr(),
        )  # fmt: skip
        self._ops = [op]
        self._keys_of, self._values_of = array("Q", [self._keys.data_ptr()]), array("Q", [self._values.data_ptr()])
        self._pass = Pass(
            rows=sum(self.counts), num_segments=len(fed), block=shape.block, groups=2, segments=address(self._segments),
            parents=address(self._parents), keys=address(self._keys_of), values=address(self._values_of),
        )  # fmt: skip

    def _store(self, shape: Shape, fed: Sequence[Fed]) -> None:
        """Put keys and values into blocks in random order; slots that hold none are not a number."""
        blocks = [-(-len(each.keys) // shape.block) for each in fed]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1))
        tables = torch.split(order, blocks)
        # The other group's table has another order: reading it would change results.
        self._tables = [torch.stack([table.flip(0), table]) for table in tables]
        rounded = shape.type == Type.INT8
        size = (sum(blocks) * shape.block, shape.kv_heads, shape.dim + (SCALE_BYTES if rounded else 0))
        self._unwritten = -1 if rounded else torch.nan  # of all bytes: a scale that is not a number
        self._keys, self._values = (torch.full(size, self._unwritten, dtype=TYPES[shape.type]) for _ in range(2))
        for each, table in zip(fed, tables, strict=True):
            slots = (table[:, None] * shape.block + torch.arange(shape.block)).flatten()[: len(each.keys)]
            stored = (round_heads(part) if rounded else part for part in (each.keys, each.values))
            self._keys[slots], self._values[slots] = stored

    def give_back(self, before: int) -> None:
        """Let blocks of the first sequence whose positions are all below `before` have other contents: nothing."""
        table, size = self._tables[0][self.GROUP], self._pass.block
        for block in table[: before // size]:
            self._keys[block * size : (block + 1) * size] = self._unwritten
            self._values[block * size : (block + 1) * size] = self._unwritten
        table[: before // size] = -(2**50)  # an entry that is read would be an address outside of all memory

    def run(self, kernels: Kernels) -> tuple[Tensor, ...]:
        """Return each sequence's result [count, heads, dim]."""
        kernels.run((Op * len(self._ops))(*self._ops), self._pass)
        return torch.split(self.out.clone(), self.counts)

    def append(self, layer: Attention) -> None:
        """Let the pass compute another layer too, of the same sequences in blocks of their own."""
        op, index = layer._ops[0], len(self._ops)
        op.layer = index
        self._ops.append(op)
        self._keys_of.append(layer._keys.data_ptr())
        self._values_of.append(layer._values.data_ptr())
        self._pass.keys, self._pass.values = address(self._keys_of), address(self._values_of)
        if Flag.SOURCE in Flag(op.flags):
            for first in range(SOURCE, len(self._segments), FIELDS):
                self._segments[first : first + 2] = layer._segments[first : first + 2]


def check_paths(isa: str, threads: int, shape: Shape, fed: Sequence[Fed], leaves: int = 1000) -> None:
    """Compare what sequences get side by side with what each path gets alone, as a chain and in one thread."""
    for each, seen in zip(fed, Attention(shape, fed).run(on(isa, threads)), strict=True):
        assert bool(seen.isfinite().all())
        for leaf in each.rows.leaves()[-leaves:]:
            (alone,) = Attention(shape, [each.along(leaf)]).run(on(isa))
            assert torch.equal(seen[each.rows.path(leaf)], alone), (each.rows.start, each.rows.chain, leaf)


def expected(shape: Shape, fed: Fed) -> Tensor:
    """Return the attention of a chain in float64, by its definition."""
    group, start = shape.heads // shape.kv_heads, fed.rows.start
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (fed.keys, fed.values))
    scores = torch.einsum("qhd,khd->hqk", fed.queries.double(), keys) * shape.dim**-0.5
    scores = reference.soft_cap(scores, shape.softcap or None)
    places, rows = torch.arange(len(keys)), torch.arange(start, start + fed.rows.count)[:, None]
    if shape.distances is not None:
        scores += shape.distances[:, (places - rows).clamp(-shape.before, shape.after) + shape.before]
    hidden = places < -rows if Flag.AHEAD in shape.flags or fed.rows.source else places > rows
    if shape.window:
        hidden = hidden | (places <= (rows if Flag.FIXED not in shape.flags else start) - shape.window)
    scores, sinks = scores.masked_fill(hidden, -torch.inf), shape.sink_scores.double()[:, None, None]
    weights = torch.cat([scores, sinks.expand(-1, len(scores[0]), 1)], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(), Shape(window=70, type=Type.BF16), Shape(dim=6, kv_heads=4, block=5), Shape(softcap=2.0),
        Shape(sinks=True, window=40), Shape(sinks=True, softcap=1.5, type=Type.BF16, heads=10, dim=24),
        Shape(type=Type.INT8, window=70, dim=64), Shape(type=Type.INT8, dim=6, kv_heads=4, block=5),
        Shape(type=Type.INT8, sinks=True, softcap=1.5, heads=10, dim=24), Shape(type=Type.INT8, heads=6, dim=128),
        Shape(before=128), Shape(before=3, window=70, type=Type.BF16), Shape(before=900, dim=6, block=5),
        Shape(before=17, softcap=2.0, sinks=True, type=Type.INT8, heads=10, dim=24),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("isa", SETS)
def test_attention_matches_its_definition(isa: str, shape: Shape) -> None:
    fed = make(shape, Rows(600, 9, COMB))
    (seen,) = Attention(shape, [fed]).run(on(isa, 2))
    for leaf in fed.rows.leaves():
        along = expected(shape, fed.along(leaf))
        assert torch.allclose(seen[fed.rows.path(leaf)].double(), along, rtol=1e-4, atol=1e-5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("start", [0, 3, 60, 505, 1300])
@pytest.mark.parametrize("flags", [Flag.AHEAD, Flag.AHEAD | Flag.FIXED, Flag.FIXED])
@pytest.mark.parametrize("window", [0, 5, 70, 600])
@pytest.mark.parametrize("reach", [0, 5, 100])
@pytest.mark.parametrize("type_", list(TYPES))
@pytest.mark.parametrize("isa", SETS)
def test_rows_that_see_one_another(isa: str, type_: Type, reach: int, window: int, flags: Flag, start: int) -> None:
    """Blocks of 16 rows match the definition, and have the same bits beside other sequences and on more threads."""
    shape = Shape(type=type_, window=window, flags=flags, before=reach, after=reach)
    fed = [make(shape, Rows(start, 16)), make(shape, Rows(777, 3), 1)]
    (alone,) = Attention(shape, fed[:1]).run(on(isa))
    assert torch.allclose(alone.double(), expected(shape, fed[0]), rtol=1e-4, atol=1e-5)
    assert torch.equal(Attention(shape, fed[::-1]).run(on(isa, 2))[1], alone)


@pytest.mark.covering(1)
@pytest.mark.parametrize("type_", list(TYPES))
@pytest.mark.parametrize("parents", [WIDE, COMB], ids=["wide", "comb"])
@pytest.mark.parametrize("isa", SETS)
def test_tree_attention_has_the_bits_of_a_chain(isa: str, parents: list[int], type_: Type) -> None:
    """Trees that begin in a tile, at its edges and at those of a span, with and without a window."""
    for threads, start in ((1, 0), (1, 60), (1, 63), (2, 511), (2, 1021), (1, 4096)):
        for window, before in ((0, 0), (40, 0), (600, 0), (0, 70)):
            shape = Shape(type=type_, window=window, before=before)
            check_paths(isa, threads, shape, [make(shape, Rows(start, 1, parents))], leaves=3)


@settings(max_examples=examples(40))
@given(data=st.data(), seed=st.integers(0, 99), threads=st.sampled_from([1, 2]))
@pytest.mark.parametrize("isa", SETS)
def test_tree_attention_of_any_topology(isa: str, data: st.DataObject, seed: int, threads: int) -> None:
    """Several sequences in a pass, prompt chunks before trees, any heads, dimensions, windows and block sizes.

    Rows see their own sequence or a source.
    """
    source = data.draw(st.booleans())
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 5), (2, 4), (3, 2), (1, 32)]))
    shape = Shape(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=data.draw(st.sampled_from([1, 6, 8, 16, 24, 32, 40, 64, 128])),
        window=0 if source else data.draw(st.sampled_from([0, 1, 7, 64, 100])),
        before=0 if source else data.draw(st.sampled_from([0, 1, 15, 128])),
        block=data.draw(st.sampled_from([1, 3, 5, 16, 64])),
        type=data.draw(st.sampled_from(list(TYPES))),
        softcap=data.draw(st.sampled_from([0.0, 0.0, 3.0])),
        sinks=data.draw(st.booleans()),
    )
    of_rows = (st.integers(0, 640), st.integers(1, 80), TREES, st.integers(1, 700) if source else st.just(0))
    drawn = data.draw(st.lists(st.tuples(*of_rows), min_size=1, max_size=3))
    check_paths(isa, threads, shape, [make(shape, Rows(*rows), seed) for rows in drawn], leaves=3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 512, 513, 700])
@pytest.mark.parametrize("parents", [(), WIDE, COMB], ids=["chain", "wide", "comb"])
@pytest.mark.parametrize("block", [3, 16, 64])
@pytest.mark.parametrize("type_", list(TYPES))
@pytest.mark.parametrize("isa", SETS)
def test_attention_over_a_source(isa: str, type_: Type, block: int, parents: Sequence[int], length: int) -> None:
    """Rows match the definition, and have the same bits beside other sequences, as chains and on more threads."""
    shape = Shape(type=type_, block=block)
    fed = [make(shape, Rows(70, 9, parents, length)), make(shape, Rows(0, 131, source=640), 1)]
    seen, _ = Attention(shape, fed).run(on(isa, 2))
    for leaf in fed[0].rows.leaves():
        along = fed[0].along(leaf)
        assert torch.allclose(seen[fed[0].rows.path(leaf)].double(), expected(shape, along), rtol=1e-4, atol=1e-5)
    for threads in (1, 2, 5):
        check_paths(isa, threads, shape, fed, leaves=3)


@pytest.mark.parametrize("start", [0, 600, 1100])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("isa", SETS)
def test_all_of_a_source_that_is_longer_than_the_text(isa: str, threads: int, start: int) -> None:
    """Threads share the spans of a source, which are more than those of the text."""
    fed = make(Shape(), Rows(start, 2, source=1700))
    (seen,) = Attention(Shape(), [fed]).run(on(isa, threads))
    assert torch.allclose(seen.double(), expected(Shape(), fed), rtol=1e-4, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("block", [3, 16, 64])
@pytest.mark.parametrize("window", [1, 40, 100, 600])
@pytest.mark.parametrize("type_", list(TYPES))
@pytest.mark.parametrize("isa", SETS)
def test_attention_reads_nothing_before_the_window(isa: str, type_: Type, window: int, block: int) -> None:
    """Blocks that no row sees may have been given back: neither their table entries nor their contents matter."""
    for start, rows in ((700, Rows(700, 9, COMB)), (1030, Rows(1030, 1)), (64, Rows(64, 30))):
        shape = Shape(window=window, block=block, type=type_)
        attention = Attention(shape, [make(shape, rows)])
        for threads in (1, 2):
            before = attention.run(on(isa, threads))
            attention.give_back(max(start + 1 - window, 0))
            (after,) = attention.run(on(isa, threads))
            assert bool(after.isfinite().all())
            assert torch.equal(after, *before)


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("type_", list(TYPES))
@pytest.mark.parametrize("isa", SETS)
def test_a_number_that_is_not_finite_reaches_all_that_see_it(isa: str, type_: Type, part: str) -> None:
    shape = Shape(type=type_)
    fed = make(shape, Rows(70, 5))
    getattr(fed, part)[72, :, 3] = torch.nan
    (seen,) = Attention(shape, [fed]).run(on(isa))
    assert bool(seen[:2].isfinite().all())
    assert bool(seen[2:].isnan().flatten(1).any(1).all())


def test_attention_of_layers_of_other_shapes() -> None:
    """One pass plans for all its layers: each has the bits that it has alone."""
    shapes = [Shape(dim=32), Shape(heads=8, kv_heads=1, dim=72), Shape(dim=16, window=100), Shape(dim=32)]
    fed, sources = [Rows(2000, 2), Rows(900, 1, COMB[:5])], (3000, 5)
    layers = [Attention(shape, [make(shape, rows) for rows in fed]) for shape in shapes[:3]]
    over = [make(shapes[3], replace(rows, source=length)) for rows, length in zip(fed, sources, strict=True)]
    layers.append(Attention(shapes[3], over))
    alone = [torch.cat(layer.run(on(SETS[0], 4))) for layer in layers]
    for layer in layers[1:]:
        layers[0].append(layer)
    layers[0].run(on(SETS[0], 4))
    for layer, expected_ in zip(layers, alone, strict=True):
        assert torch.equal(layer.out, expected_)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("isa", SETS)
def test_tree_attention_has_no_bound_of_depth(isa: str, window: int) -> None:
    """Paths of 700 nodes with a sibling at the root, before them and behind them."""
    shape = Shape(window=window)
    before, behind = [-1, -1, *range(1, 700)], [*range(-1, 699), -1]
    check_paths(isa, 2, shape, [make(shape, Rows(100, 3, parents)) for parents in (before, behind)])


def test_tree_attention_of_interleaved_paths() -> None:
    """Four paths of 200 nodes each, in order of depth."""
    check_paths(SETS[0], 2, Shape(), [make(Shape(), Rows(200, 1, [-1] * 4 + list(range(796))))])


@pytest.mark.slow
@pytest.mark.parametrize("context", [4096, 4050])
def test_tree_attention_costs_what_a_chain_does(context: int) -> None:
    """47 nodes behind a long context: if each loaded its tiles alone, they would take four times as long as a chain."""
    shape, kernels = Shape(heads=8, kv_heads=8, dim=64, type=Type.BF16), on(SETS[0])
    passes = [Attention(shape, [make(shape, rows)]) for rows in (Rows(context, 48), Rows(context, 1, WIDE))]
    chain, tree = (cpu_seconds(partial(attention.run, kernels), repeats=7) for attention in passes)
    assert tree < 2 * chain
