"""The native interpreter of a description: a pass is recorded once over fixed buffers, and run in one call.

x      the residual stream                               [T, hidden]
y      x after a norm, or a block's result before one    [T, hidden]
qkv    queries, keys and values                          [T, (heads + 2 kv_heads) head_dim]
heads  the output of attention, or of a state            [T, heads head_dim]
gated  activation(gate) * up, or activation(up)          [T, intermediate]
gates  gate, where up has another type, or of attention  [T, intermediate or heads head_dim]

Layers with a recurrence have `qkv` for all projections of their input, and queries, keys and values after the
convolution in `columns` [T, width].

Layers with experts have `gated` and `gates` for each expert of a row. They and layers with inputs by token have further
arrays: see native/packed.py. The kernels keep scratch memory, which grows with the sizes of a pass, up to bounds:

buffers      the activations of each row                         above
tiles        each row, packed for a linear layer                 csrc/tiles.h
own rows     a pass's only row, normed and packed, per thread    csrc/program.h
angles       cosines and sines of each position                  models/native/decoder.py
spans        softmaxes of each row, head and span of keys        csrc/attention.h; at most MOST_SPAN_BYTES
items        keys and softmaxes, or a state, of one work item    csrc/attention.h, csrc/states.h; per thread
sampling     logits and probs of each row                        kernels/native.py; at most MOST_BYTES
candidates   tokens that top-k, top-p and min-p choose from      csrc/probs.h, per thread
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import MOST_PENDING, by_length
from speculant.kernels import MOST_BYTES, Activation, Bounds, Code, Flag, Kernels, Op, Pass, Type, Weight
from speculant.models.description import Attention, DecoderConfig, State
from speculant.models.heads import Linears
from speculant.models.native.packed import (
    PackedAttention,
    PackedDecoder,
    PackedEmbedding,
    PackedEncoder,
    PackedExperts,
    PackedLayer,
    PackedMlp,
    PackedNorm,
    PackedState,
    adding_inputs,
    copying,
    embedding,
    gating,
    linear,
    linears,
    make_op,
    normalising,
    recurring,
)
from speculant.models.positions import rotation_of, rotations
from speculant.models.sizes import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_CROSS,
    BEFORE_MLP,
    END_ATTENTION,
    END_CROSS,
    END_MLP,
)
from speculant.types import LayerStates

FLOAT_BYTES = 4
FEWEST_LINEAR_ROWS = 8  # that `NativeLinears` has room for at first
TAPPED_ROWS = 32  # of one allocation, unless a pass has more


class Buffers:
    """The activations of a pass of up to `room` rows.

    gates: None = no layer computes a gate alone. scores, results: None = no layer has experts. embedded, inputs,
    projected: None = no layer has inputs by token. columns: None = no layer has a recurrence.
    """

    def __init__(self, weights: PackedDecoder, room: int) -> None:
        self.room = room
        made = {name: torch.empty(room, width) for name, width in weights.activations.items()}
        self.gates, self.scores, self.results = (made.pop(name, None) for name in ("gates", "scores", "results"))
        self.columns = made.pop("columns", None)
        self.embedded, self.inputs, self.projected = (
            made.pop(name, None) for name in ("embedded", "inputs", "projected")
        )
        self.x, self.y, self.qkv, self.heads, self.gated = made.values()


class TapMemory:
    """Memory for the states of `layers` layers, which passes fill row after row.

    One allocation serves many passes of few rows. It lives as long as any `LayerStates` of it.
    """

    def __init__(self, layers: int, width: int) -> None:
        self._layers, self._width = layers, width
        self._memory, self._first_bytes = torch.empty(layers, 0, width), list[int]()
        self._used = 0

    def take(self, rows: int) -> tuple[LayerStates, list[int]]:
        """Return the next rows, float32 [rows, width] of each layer, and the address of each layer's first one."""
        if self._used + rows > self._memory.shape[1]:
            room = max(rows, TAPPED_ROWS)
            self._memory, self._used = torch.empty(self._layers, room, self._width, dtype=torch.float32), 0
            first = self._memory.data_ptr()
            self._first_bytes = [first + FLOAT_BYTES * layer * room * self._width for layer in range(self._layers)]
        first, offset = self._used, FLOAT_BYTES * self._used * self._width
        self._used += rows
        return LayerStates(self._memory, first, self._used), [address + offset for address in self._first_bytes]


class Program:
    """A recorded pass. Programs share the buffers, which hold one pass at a time.

    The result is in `hidden` [room, hidden]. The input of each of `layers` (the number of layers = the output of the
    last one) is copied to memory that `next_taps` takes. Call `next_taps` before each pass.
    """

    def __init__(self, weights: PackedDecoder, buffers: Buffers, layers: Sequence[int] = ()) -> None:
        self.hidden = buffers.y
        self._weights, self._buffers, self._layers = weights, buffers, layers
        self._windows = by_length(layer.window for layer in weights.config.layers)  # of the groups of layers
        recorded = list(self._record())
        self.ops: ctypes.Array[Op] = (Op * len(recorded))(*recorded)
        tapped = [op for op in self.ops if _tap_field(op, buffers.y)]  # until `next_taps` sets the address
        found = dict(zip(sorted(set(layers)), tapped, strict=True))
        distinct = list(dict.fromkeys(layers))
        self._taps = [(found[layer], _tap_field(found[layer], buffers.y)) for layer in distinct]
        self._places = None if len(distinct) == len(layers) else [distinct.index(layer) for layer in layers]
        self._tap_memory = TapMemory(len(distinct), weights.config.hidden_size)

    def next_taps(self, rows: int) -> Sequence[Tensor]:
        """Return where the next pass of `rows` rows writes the input of each of `layers`, float32 [rows, hidden] each.

        No row is written twice.
        """
        if not self._taps:
            return ()
        states, addresses = self._tap_memory.take(rows)
        for (op, field), address in zip(self._taps, addresses, strict=True):
            setattr(op, field, address)
        return states if self._places is None else tuple([states[place] for place in self._places])

    def _record(self) -> Iterator[Op]:
        weights, buffers = self._weights, self._buffers
        yield from self._embedding(weights.embedding)
        if buffers.embedded is not None:
            yield embedding(weights.table, buffers.embedded, weights.config.embedding.scale)
        for index, layer in enumerate(weights.layers):
            yield from self._layer(index, layer)
        yield from self._enter(len(weights.layers), weights.norm)

    def _embedding(self, own: PackedEmbedding) -> Iterator[Op]:
        """Fill x with input embeddings."""
        weights, x = self._weights, self._buffers.x
        yield embedding(weights.table, x, weights.config.embedding.scale, own.positions)
        yield from self._normalise(own.norm)

    def _normalise(self, norm: PackedNorm | None) -> Iterator[Op]:
        """Normalise x itself, if there is a norm."""
        if norm:
            yield normalising(norm, self._buffers.x, self._buffers.x)

    def _layer(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        own, before, buffers = layer.mixing, layer.norms.get(BEFORE_ATTENTION), self._buffers
        yield from self._enter(index, before)
        if isinstance(own, PackedState):
            yield from linears(own.inner, self._normed(before), buffers.qkv, own.inner_bias)
            columns = buffers.columns if own.of.heads else None
            yield from recurring(own.of, index, own.vectors, buffers.qkv, columns, buffers.heads)
            yield from self._after_mixing(index, layer)
            return
        yield from linears(own.qkv, self._normed(before), buffers.qkv, own.qkv_bias)
        if own.gate:
            assert buffers.gates is not None
            yield linear(own.gate, self._normed(before), buffers.gates, own.gate_bias)
        yield from self._after_queries(index, layer)

    def _after_queries(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        """Yield the rest of a layer, after queries, keys and values are computed, and gates."""
        own, buffers = layer.attention, self._buffers
        yield from self._rotation(index, own, own.of.heads)
        yield self._attention(index, own)
        if own.gate:
            assert buffers.gates is not None
            yield gating(buffers.gates, buffers.heads, own.of.query_size, Activation.SIGMOID)
        yield from self._after_mixing(index, layer)

    def _after_mixing(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        """Yield the rest of a layer, after the result of attention or of its state is in `heads`.

        All results are added to x; with `parallel`, only after x was read for both blocks.
        """
        buffers, own, scale = self._buffers, layer.mixing, layer.of.residual_scale
        attended = [*self._add(own.out, buffers.heads, own.out_bias, layer.norms.get(AFTER_ATTENTION), scale)]
        attended += [*self._normalise(layer.norms.get(END_ATTENTION)), *self._cross(index, layer)]
        inner = self._inner(layer)
        yield from (*inner, *attended) if layer.of.parallel else (*attended, *inner)
        if isinstance(layer.mlp, PackedMlp):
            yield from self._add(layer.mlp.down, buffers.gated, layer.mlp.down_bias, layer.norms.get(AFTER_MLP), scale)
        else:
            yield from self._add_experts(layer.mlp, layer.norms.get(AFTER_MLP), scale)
        yield from self._normalise(layer.norms.get(END_MLP))
        if layer.inputs:
            assert buffers.embedded is not None
            assert buffers.inputs is not None
            assert buffers.projected is not None
            memory = buffers.embedded, buffers.inputs, buffers.projected
            yield from adding_inputs(layer.inputs, buffers.x, buffers.y, *memory)
        if layer.scale != 1:
            yield copying(buffers.x, buffers.x, layer.scale)

    def _cross(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        """Add attention over the source to x, if the layer has it."""
        if layer.cross is None:
            return
        buffers, own, before = self._buffers, layer.cross, layer.norms.get(BEFORE_CROSS)
        if before:
            yield normalising(before, buffers.x, buffers.y)
        yield from linears(own.qkv[:1], self._normed(before), buffers.qkv, own.query_bias)
        yield self._attention(index, own)
        yield from self._add(own.out, buffers.heads, own.out_bias, None, layer.of.residual_scale)
        yield from self._normalise(layer.norms.get(END_CROSS))

    def _add(
        self, weight: Weight, source: Tensor, bias: Tensor | None, norm: PackedNorm | None, scale: float
    ) -> Iterator[Op]:
        """Add scale * norm(source weight^T + bias) to x."""
        x, y = self._buffers.x, self._buffers.y
        if norm is None:
            yield linear(weight, source, x, bias, Flag.ADD, factor=scale)
        else:
            yield linear(weight, source, y, bias)
            yield normalising(norm, y, x, Flag.ADD, factor=scale)

    def _add_experts(self, experts: PackedExperts, norm: PackedNorm | None, scale: float) -> Iterator[Op]:
        """Add scale * norm(the weighted sum of each row's experts) to x."""
        x, y, results, gated = self._buffers.x, self._buffers.y, self._buffers.results, self._buffers.gated
        assert results is not None
        if norm is None:
            yield from experts.combining(results, gated, x, Flag.ADD, factor=scale)
        else:
            yield from experts.combining(results, gated, y)
            yield normalising(norm, y, x, Flag.ADD, factor=scale)

    def _inner(self, layer: PackedLayer) -> Iterator[Op]:
        """Compute `gated` from the block's input, and for experts also their results."""
        buffers, mlp, before = self._buffers, layer.mlp, layer.norms.get(BEFORE_MLP)
        if before:
            yield normalising(before, buffers.x, buffers.y)
        source = self._normed(before or (layer.norms.get(BEFORE_ATTENTION) if layer.of.parallel else None))
        if isinstance(mlp, PackedExperts):
            assert buffers.scores is not None
            assert buffers.results is not None
            yield from mlp.computing(source, buffers.scores, buffers.gated, buffers.gates, buffers.results)
            return
        yield from mlp.computing(source, buffers.gated, buffers.gates)

    def _enter(self, layer: int, norm: PackedNorm | None) -> Iterator[Op]:
        """Normalise a layer's input; if it is tapped, `next_taps` sets the address of the copy."""
        x, y, tapped = self._buffers.x, self._buffers.y, layer in self._layers
        if norm:
            yield normalising(norm, x, y, copy=y if tapped else None)
        elif tapped:
            yield copying(x, y)

    def _normed(self, norm: PackedNorm | None) -> Tensor:
        """Return where x is after a norm."""
        return self._buffers.y if norm else self._buffers.x

    def _rotation(self, index: int, own: PackedAttention, heads: int) -> Iterator[Op]:
        """Normalise values; normalise and rotate the last `heads` queries, and keys; store keys and values."""
        of, qkv, fields = own.of, self._buffers.qkv, dict[str, Tensor | float | None]()
        if own.value_norm:  # to the kernels, these are queries
            norm, values = own.value_norm, qkv[:, of.query_size + of.key_size :]
            yield self._of_heads(
                Code.ROTATE, index, of, source=values, heads=of.kv_heads, kv_heads=0, scale=norm.scale, bias=norm.bias,
                eps=norm.of.eps, flags=norm.flag,
            )  # fmt: skip
        if own.query_norm:
            query, key = own.query_norm, own.key_norm
            flags = query.flag | (Flag.ALL_HEADS if of.norm_all_heads else Flag.NONE)
            fields = {"scale": query.scale, "bias": query.bias, "eps": query.of.eps, "flags": flags}
            fields |= {"key_scale": key.scale, "key_bias": key.bias} if key else {}
        if rotation := rotation_of(of):
            fields |= {"rope": rotations(self._weights.config).index(rotation), "rotated": of.rotated}
        source = qkv[:, (of.heads - heads) * of.head_dim :]
        yield self._of_heads(Code.ROTATE, index, of, source=source, heads=heads, kv_heads=of.own_kv_heads, **fields)

    def _keys(self, index: int, own: PackedAttention, source: Tensor) -> Iterator[Op]:
        """Compute and store keys and values of `source`, whose queries are apart."""
        yield from linears(own.qkv[1:], source, self._buffers.qkv[:, own.of.query_size :], own.key_bias)
        yield from self._rotation(index, own, 0)

    def _attention(self, index: int, own: PackedAttention) -> Op:
        of, distances = own.of, dict[str, Tensor | float | None]()
        if own.distances:
            numbers, before, after = own.distances
            distances = {"distances": numbers, "before": before, "after": after}
        return self._of_heads(
            Code.ATTEND, index, of, source=self._buffers.qkv, heads=of.heads, kv_heads=of.kv_heads, flags=_flags(of),
            out=self._buffers.heads, window=of.window, factor=of.score_scale, softcap=of.softcap, sinks=own.sinks,
            **distances,
        )  # fmt: skip

    def _of_heads(self, code: Code, layer: int, of: Attention, **fields: Tensor | float | None) -> Op:
        return make_op(
            code, self._weights.cache_type, layer=layer, group=self._windows.index(of.window), dim=of.head_dim,
            stride=self._buffers.qkv.shape[1], **fields,
        )  # fmt: skip


def _flags(of: Attention) -> Flag:
    """Return the positions that rows see."""
    found = {Flag.AHEAD: of.ahead, Flag.FIXED: of.fixed_window, Flag.SOURCE: of.source}
    return functools.reduce(operator.or_, (flag for flag, has in found.items() if has), Flag.NONE)


class SourceKeys(Program):
    """A recorded pass that computes each decoder layer's keys and values of sources from the result in `hidden`."""

    def _record(self) -> Iterator[Op]:
        for index, layer in enumerate(self._weights.layers):
            if layer.cross:
                yield from self._keys(index, layer.cross, self._buffers.y)


class EncoderProgram(SourceKeys):
    """A recorded pass over whole sources that computes the encoder's result first.

    The encoder's layers use the storage of the decoder's first layer for their own keys and values, which nobody reads
    after the pass.
    """

    def __init__(self, weights: PackedDecoder, buffers: Buffers) -> None:
        assert weights.encoder is not None
        self._encoder: PackedEncoder = weights.encoder
        super().__init__(weights, buffers)

    def _record(self) -> Iterator[Op]:
        buffers, encoder = self._buffers, self._encoder
        yield from self._embedding(encoder.embedding)
        for layer in encoder.layers:
            yield from self._layer(0, layer)
        yield normalising(encoder.norm, buffers.x, buffers.y)
        yield from super()._record()


def _tap_field(op: Op, y: Tensor) -> str:
    """Return the field with the address of a tap, which is y's at first; "" if the operation has no tap."""
    if op.code == Code.COPY:
        return "out" if op.out == y.data_ptr() else ""
    return "copy" if op.copy == y.data_ptr() else ""


class NativeLinears(Linears):
    """See `Linears` (models/heads.py). A row's result depends on that row alone, bit for bit."""

    def __init__(self, kernels: Kernels, type_: Type, matrices: Sequence[Tensor], biases: Tensor | None) -> None:
        self._kernels, self._weights = kernels, [kernels.pack(type_, matrix) for matrix in matrices]
        self._biases = None if biases is None else biases.float().contiguous()
        self._take_room(FEWEST_LINEAR_ROWS)

    def _take_room(self, rows: int) -> None:
        count, (n, k) = len(self._weights), (self._weights[0].n, self._weights[0].k)
        self._x, self._out = torch.empty(count, rows, k), torch.empty(count, rows, n)
        biases = [None] * count if self._biases is None else [*self._biases]
        self._ops = (Op * count)(*map(linear, self._weights, self._x, self._out, biases))
        self._kernels.check(self._ops, Bounds(rows=rows))

    @override
    def __call__(self, x: Tensor) -> Tensor:
        """Float32."""
        count, rows = x.shape[:2]
        if rows > self._x.shape[1]:
            self._take_room(max(rows, 2 * self._x.shape[1]))
        self._x[:count, :rows] = x
        self._kernels.run((Op * count).from_buffer(self._ops), Pass(rows=rows))
        return self._out[:count, :rows].clone()


# Arrays whose rows are packed; `results` is as wide as what experts gather.
READ = ("x", "heads", "gated", "results", "inputs")
REAL, DOUBLE, CANDIDATE = 4, 8, 16  # bytes
GROWTH = 2  # an array that grows takes up to twice its need
MOST_SPAN_BYTES = 2**24  # MOST_PARTIAL of csrc/attention.h
TILE, SPAN, MOST_BLOCK_REALS, LANES = 64, 512, 2**14, 16  # of csrc/attention.h; LANES: of the widest set
CONVOLVED = 2**10  # of csrc/states.h


def scratch_bytes(config: DecoderConfig, widths: Mapping[str, int], threads: int, rows: int, positions: int) -> int:
    """Return the most bytes that passes of `rows` rows keep, over sequences of up to `positions` positions.

    widths: of the arrays that a pass fills for a row.
    """
    widest = max(widths.get(name, 0) for name in READ)
    per_row = sum(widths.values()) + GROWTH * widest
    tables = 1 if config.restart_at is None else 2
    angles = tables * _power(positions) * sum(rotation.dims or 0 for rotation in rotations(config))
    sampling = min(MOST_BYTES, GROWTH * rows * config.vocab_size * (REAL + DOUBLE))
    candidates = GROWTH * threads * config.vocab_size * CANDIDATE
    kinds = config.attentions
    items = [*map(_item, kinds), *(_state_item(of) for of in config.states if of)]
    reals = _power(rows) * per_row + angles + threads * (max(items) + 2 * GROWTH * widest)
    spans = max((_span_bytes(of, threads, rows, positions) for of in kinds), default=0)
    return REAL * reals + spans + sampling + candidates


def _padded(of: Attention) -> int:
    return -(-of.head_dim // LANES) * LANES


def _item(of: Attention) -> int:
    """Return the numbers that a work item of attention holds: keys and values of a tile, two softmaxes per query."""
    padded = _padded(of)
    return _power(2 * TILE * padded) + _power(2 * max(MOST_BLOCK_REALS, of.groups * (padded + 2)))


def _state_item(of: State) -> int:
    """Return the numbers that work items of a state hold: columns of some channels, a head's state and its steps."""
    padded = -(-of.head_dim // LANES) * LANES
    return _power(of.conv * CONVOLVED) + _power(of.key_dim * padded + 2 * MOST_PENDING * (of.key_dim + padded))


def _span_bytes(of: Attention, threads: int, rows: int, positions: int) -> int:
    spans = -(-positions // SPAN)
    if spans <= 1 or threads == 1:
        return 0
    return min(MOST_SPAN_BYTES, REAL * _power(rows * of.heads * spans * (_padded(of) + 2)))


def _power(count: int) -> int:
    """Return the least power of two, from 256 up, that is not below a count: rows and positions grow in such steps."""
    return max(256, 1 << (count - 1).bit_length())
