"""The native interpreter of a description: a pass is recorded once over fixed buffers, and run in one call.

x      the residual stream               [T, hidden]
y      x after a norm                    [T, hidden]
qkv    queries, keys and values          [T, (heads + 2 kv_heads) head_dim]
heads  the output of attention           [T, heads head_dim]
gated  silu(gate) * up                   [T, intermediate]
gates  gate, where up has another type   [T, intermediate]
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.kernels.native import TYPES, Code, Flag, Kernels, Op, Pass, Type, Weight
from speculant.models.description import Attention, DecoderConfig, Layer, Norm
from speculant.models.sizes import HEAD, LAYER, NORM, TABLE, activations
from speculant.models.weights.reader import WeightReader
from speculant.types import LayerStates

FLOAT_BYTES = 4
FEWEST_LINEAR_ROWS = 8  # that `NativeLinears` has room for at first
TAPPED_ROWS = 32  # that one allocation has room for, or those of a pass if they are more


class PackedNorm(NamedTuple):
    """The scales of a norm."""

    scale: Tensor
    eps: float

    @classmethod
    def read(cls, of: Norm | None, weights: WeightReader, name: str) -> PackedNorm | None:
        """Read a norm; None = the model does not have it."""
        return cls(weights.vector(name), of.eps) if of else None


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer that `of` describes. Vectors are float32; None = it does not have this one.

    qkv: the matrices of queries, keys and values in this order; neighbours of the same type are one matrix.
    gate_up: both matrices interleaved, or one after the other if their types differ.
    """

    of: Layer
    input_norm: PackedNorm | None
    qkv: tuple[Weight, ...]
    qkv_bias: Tensor | None
    query_norm: PackedNorm | None
    key_norm: PackedNorm | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm: PackedNorm | None
    gate_up: tuple[Weight, ...]
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None

    @classmethod
    def read(cls, of: Layer, layer: WeightReader) -> PackedLayer:
        """Read and pack a layer's weights."""
        own, attention, mlp = of.attention, layer.inside("self_attn."), layer.inside("mlp.")
        return cls(
            of=of,
            input_norm=PackedNorm.read(of.before_attention, layer, "input_layernorm.weight"),
            qkv=attention.matrices("q_proj.weight", "k_proj.weight", "v_proj.weight"),
            qkv_bias=attention.vector("q_proj.bias", "k_proj.bias", "v_proj.bias") if own.bias else None,
            query_norm=PackedNorm.read(own.qk_norm, attention, "q_norm.weight"),
            key_norm=PackedNorm.read(own.qk_norm, attention, "k_norm.weight"),
            out=attention.matrix("o_proj.weight"),
            out_bias=attention.vector("o_proj.bias") if own.output_bias else None,
            mlp_norm=PackedNorm.read(of.before_mlp, layer, "post_attention_layernorm.weight"),
            gate_up=mlp.interleaved("gate_proj.weight", "up_proj.weight"),
            gate_up_bias=mlp.vector("gate_proj.bias", "up_proj.bias") if of.mlp.bias else None,
            down=mlp.matrix("down_proj.weight"),
            down_bias=mlp.vector("down_proj.bias") if of.mlp.bias else None,
        )

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """All its matrices."""
        return (*self.qkv, self.out, *self.gate_up, self.down)


@dataclass(frozen=True)
class PackedDecoder:
    """All weights of a decoder. The table is never rounded; a tied head is the table unless the head is rounded."""

    config: DecoderConfig
    cache_type: Type
    table: Weight
    head: Weight
    norm: PackedNorm | None
    layers: list[PackedLayer]

    @classmethod
    def read(cls, config: DecoderConfig, weights: WeightReader) -> PackedDecoder:
        """Read and pack a decoder's weights, one tensor at a time."""
        table, tied = weights.rounding(None).matrix(TABLE), config.head.tied
        head = table if tied and weights.rounded is None else weights.matrix(TABLE if tied else HEAD)
        norm = PackedNorm.read(config.norm, weights, NORM)
        layers = [PackedLayer.read(of, weights.inside(LAYER.format(i))) for i, of in enumerate(config.layers)]
        return cls(config, TYPES[weights.types.dtype], table, head, norm, layers)

    @property
    def activations(self) -> dict[str, int]:
        """The width of each array that a pass fills for a row."""
        widths = activations(self.config)
        apart = any(len(layer.gate_up) > 1 for layer in self.layers)
        return widths | ({"gates": widths["gated"]} if apart else {})

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of any size reads, padding included: a lower bound of its time."""
        matrices = [weight for layer in self.layers for weight in layer.matrices]
        return sum(weight.memory.numel() for weight in [*matrices, self.head])


class Buffers:
    """The activations of a pass of up to `room` rows. gates: None = no layer computes its gate alone."""

    def __init__(self, weights: PackedDecoder, room: int) -> None:
        self.room = room
        made = {name: torch.empty(room, width) for name, width in weights.activations.items()}
        self.gates = made.pop("gates", None)
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
    last one) is copied to memory that `next_taps` takes, which must be called before each pass.
    """

    def __init__(self, weights: PackedDecoder, buffers: Buffers, layers: Sequence[int] = ()) -> None:
        self.hidden = buffers.y
        self._weights, self._buffers, self._layers = weights, buffers, layers
        recorded = list(self._record())
        self.ops: ctypes.Array[Op] = (Op * len(recorded))(*recorded)
        tapped = [op for op in self.ops if op.copy == buffers.y.data_ptr()]  # until `next_taps` sets the address
        found = dict(zip(sorted(set(layers)), tapped, strict=True))
        distinct = list(dict.fromkeys(layers))
        self._taps = [found[layer] for layer in distinct]
        self._places = None if len(distinct) == len(layers) else [distinct.index(layer) for layer in layers]
        self._tap_memory = TapMemory(len(distinct), weights.config.hidden_size)

    def next_taps(self, rows: int) -> Sequence[Tensor]:
        """Return where the next pass of `rows` rows writes the input of each of `layers`, float32 [rows, hidden] each.

        No row is written twice.
        """
        if not self._taps:
            return ()
        states, addresses = self._tap_memory.take(rows)
        for op, address in zip(self._taps, addresses, strict=True):
            op.copy = address
        return states if self._places is None else tuple([states[place] for place in self._places])

    def _record(self) -> Iterator[Op]:
        weights, buffers = self._weights, self._buffers
        yield embedding(weights.table, buffers.x)
        for index, layer in enumerate(weights.layers):
            yield from self._layer(index, layer)
        yield self._tapped_norm(len(weights.layers), weights.norm)

    def _layer(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        buffers = self._buffers
        yield self._tapped_norm(index, layer.input_norm)
        yield from linears(layer.qkv, buffers.y, buffers.qkv, layer.qkv_bias)
        yield from self._after_queries(index, layer)

    def _after_queries(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        """Yield the rest of a layer, once queries, keys and values are there."""
        buffers, of = self._buffers, layer.of.attention
        x, norms = buffers.x, dict[str, Tensor | float]()
        if layer.query_norm and layer.key_norm:
            norms = {"scale": layer.query_norm.scale, "bias": layer.key_norm.scale, "eps": layer.query_norm.eps}
        yield self._attention(Code.ROTATE, index, of, **norms)
        yield self._attention(Code.ATTEND, index, of, out=buffers.heads, window=of.window)
        yield linear(layer.out, buffers.heads, x, layer.out_bias, Flag.ADD)
        yield self._norm(layer.mlp_norm, x, buffers.y)
        yield from self._gate(layer)
        yield linear(layer.down, buffers.gated, x, layer.down_bias, Flag.ADD)

    def _gate(self, layer: PackedLayer) -> Iterator[Op]:
        buffers, bias = self._buffers, layer.gate_up_bias
        if len(layer.gate_up) == 1:
            yield linear(layer.gate_up[0], buffers.y, buffers.gated, bias, Flag.SILU)
            return
        gate, up = layer.gate_up
        assert buffers.gates is not None
        yield linear(gate, buffers.y, buffers.gates, bias)
        yield linear(up, buffers.y, buffers.gated, None if bias is None else bias[gate.n :])
        yield gating(buffers.gates, buffers.gated, gate.n)

    def _tapped_norm(self, layer: int, norm: PackedNorm | None) -> Op:
        """Return the norm of a layer's input; if it is tapped, `next_taps` sets the address of the copy."""
        buffers = self._buffers
        return self._norm(norm, buffers.x, buffers.y, buffers.y if layer in self._layers else None)

    def _norm(self, norm: PackedNorm | None, source: Tensor, out: Tensor, copy: Tensor | None = None) -> Op:
        assert norm is not None, "a norm that the description does not have is computed"
        width = source.shape[1]
        return _op(Code.NORM, n=width, scale=norm.scale, source=source, out=out, copy=copy, eps=norm.eps)

    def _attention(self, code: Code, layer: int, of: Attention, **fields: Tensor | float | None) -> Op:
        return _op(
            code, self._weights.cache_type, layer=layer, source=self._buffers.qkv, heads=of.heads,
            kv_heads=of.kv_heads, dim=of.head_dim, factor=of.head_dim**-0.5, **fields,
        )  # fmt: skip


def embedding(table: Weight, out: Tensor) -> Op:
    """Return the operation that looks tokens up in a table packed from [vocabulary, hidden]."""
    return _op(Code.EMBED, table.type, n=table.k, k=table.n, weight=table, out=out)


def copying(source: Tensor, out: Tensor) -> Op:
    """Return the operation out = source, of the same width."""
    return _op(Code.COPY, n=source.shape[1], source=source, out=out)


def gating(source: Tensor, out: Tensor, n: int) -> Op:
    """Return the operation out = silu(source) * out, of rows of n numbers."""
    return _op(Code.GATE, n=n, source=source, out=out)


def linear(
    weight: Weight, source: Tensor | None, out: Tensor | None, bias: Tensor | None = None, flags: Flag = Flag.NONE
) -> Op:
    """Return the operation out (+)= source weight^T + bias."""
    return _op(
        Code.LINEAR, weight.type, n=weight.n, k=weight.k, weight=weight, source=source, out=out, bias=bias, flags=flags
    )


def linears(
    weights: Sequence[Weight], source: Tensor, out: Tensor, bias: Tensor | None = None, flags: Flag = Flag.NONE
) -> Iterator[Op]:
    """Yield the operations of a matrix that consists of these weights, by rows; each writes its own columns."""
    first = 0
    for weight in weights:
        op = linear(weight, source, out[:, first:], None if bias is None else bias[first:], flags)
        op.stride = out.shape[1]
        yield op
        first += weight.n


def _op(code: Code, type_: Type = Type.F32, **fields: Tensor | Weight | float | None) -> Op:
    values = {name: _address(value) for name, value in fields.items() if value is not None}
    return Op(code=code, type=type_, **values)


def _address(value: Tensor | Weight | float) -> float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value.address if isinstance(value, Weight) else value


class NativeLinears:
    """See `Linears` (models/linears.py). A row's result depends on that row alone, bit for bit."""

    def __init__(self, kernels: Kernels, type_: Type, matrices: Sequence[Tensor], biases: Tensor | None) -> None:
        self._kernels, self._weights = kernels, [kernels.pack(type_, matrix) for matrix in matrices]
        self._biases = None if biases is None else biases.float().contiguous()
        self._take_room(FEWEST_LINEAR_ROWS)

    def _take_room(self, rows: int) -> None:
        count, (n, k) = len(self._weights), (self._weights[0].n, self._weights[0].k)
        self._x, self._out = torch.empty(count, rows, k), torch.empty(count, rows, n)
        biases = [None] * count if self._biases is None else [*self._biases]
        self._ops = (Op * count)(*map(linear, self._weights, self._x, self._out, biases))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linears`; float32."""
        count, rows = x.shape[:2]
        if rows > self._x.shape[1]:
            self._take_room(max(rows, 2 * self._x.shape[1]))
        self._x[:count, :rows] = x
        self._kernels.run((Op * count).from_buffer(self._ops), Pass(rows=rows))
        return self._out[:count, :rows].clone()
