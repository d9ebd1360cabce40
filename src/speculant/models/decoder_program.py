"""A decoder's pass as a program for the native kernels: recorded once over fixed buffers, replayed in one call.

x      the residual stream               [T, hidden]
y      x after a norm                    [T, hidden]
qkv    queries, keys and values          [T, (heads + 2 kv_heads) head_dim]
heads  the output of attention           [T, heads head_dim]
gated  silu(gate) * up                   [T, intermediate]
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.native import TYPES, Code, Flag, Op, Type, Weight
from speculant.models.config import DecoderConfig
from speculant.models.weight_reader import WeightReader


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer. Vectors are float32; None = the family does not have this one."""

    input_norm: Tensor | None
    qkv: Weight
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None

    @classmethod
    def read(cls, layer: WeightReader, type_: Type) -> PackedLayer:
        """Read and pack a layer's weights."""
        attention, mlp = layer.inside("self_attn."), layer.inside("mlp.")
        return cls(
            input_norm=layer.optional("input_layernorm.weight"),
            qkv=attention.matrix(type_, "q_proj.weight", "k_proj.weight", "v_proj.weight"),
            qkv_bias=attention.optional("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            query_norm=attention.optional("q_norm.weight"),
            key_norm=attention.optional("k_norm.weight"),
            out=attention.matrix(type_, "o_proj.weight"),
            out_bias=attention.optional("o_proj.bias"),
            mlp_norm=layer.vector("post_attention_layernorm.weight"),
            gate_up=mlp.interleaved(type_, "gate_proj.weight", "up_proj.weight"),
            gate_up_bias=mlp.optional("gate_proj.bias", "up_proj.bias"),
            down=mlp.matrix(type_, "down_proj.weight"),
            down_bias=mlp.optional("down_proj.bias"),
        )


@dataclass(frozen=True)
class PackedDecoder:
    """All weights of a decoder. The embedding table is never quantised."""

    config: DecoderConfig
    cache_type: Type
    table: Weight
    head: Weight
    norm: Tensor
    layers: list[PackedLayer]

    @classmethod
    def read(cls, config: DecoderConfig, weights: WeightReader, quantization: Type | None) -> PackedDecoder:
        """Read and pack a decoder's weights, one tensor at a time."""
        plain = TYPES[weights.dtype]
        type_ = plain if quantization is None else quantization
        embedding = "model.embed_tokens.weight"
        table = weights.matrix(plain, embedding)
        tied = config.tie_embeddings
        head = table if tied and type_ == plain else weights.matrix(type_, embedding if tied else "lm_head.weight")
        norm = weights.vector("model.norm.weight")
        layers = [PackedLayer.read(weights.inside(f"model.layers.{i}."), type_) for i in range(config.num_layers)]
        return cls(config, plain, table, head, norm, layers)

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of any size reads, padding included: a lower bound of its time."""
        matrices = [weight for layer in self.layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(weight.memory.numel() for weight in [*matrices, self.head])


class Buffers:
    """The activations of a pass of up to `room` rows."""

    def __init__(self, config: DecoderConfig, room: int) -> None:
        self.room = room
        self.x, self.y = torch.empty(room, config.hidden_size), torch.empty(room, config.hidden_size)
        self.qkv = torch.empty(room, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self.heads = torch.empty(room, config.num_heads * config.head_dim)
        self.gated = torch.empty(room, config.intermediate_size)


class Program:
    """A recorded pass. Programs share the buffers, which hold one pass at a time.

    The result is in `hidden` [room, hidden]. The input of each of `layers` (the number of layers = the output of the
    last one) is copied to where `write_taps` says, which must be said before each pass.
    """

    def __init__(self, weights: PackedDecoder, buffers: Buffers, layers: Sequence[int] = ()) -> None:
        self.hidden = buffers.y
        self._weights, self._buffers, self._layers = weights, buffers, layers
        recorded = list(self._record())
        self.ops: ctypes.Array[Op] = (Op * len(recorded))(*recorded)
        copies = [op for op in self.ops if op.code == Code.COPY and op.out is None]
        order = sorted(range(len(layers)), key=layers.__getitem__)
        self._taps = [copies[order.index(tap)] for tap in range(len(layers))]

    def write_taps(self, taps: Sequence[Tensor]) -> None:
        """Let the next pass write the input of layer `layers[i]` to taps[i], float32 [rows, hidden]."""
        for op, tap in zip(self._taps, taps, strict=True):
            op.out = tap.data_ptr()

    def _record(self) -> Iterator[Op]:
        weights, buffers = self._weights, self._buffers
        yield embedding(weights.table, buffers.x)
        for index, layer in enumerate(weights.layers):
            yield from self._tap(index)
            yield from self._layer(index, layer)
        yield from self._tap(len(weights.layers))
        yield self._norm(weights.norm, buffers.x, buffers.y)

    def _layer(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        buffers = self._buffers
        assert layer.input_norm is not None, "the layer has no input norm"
        yield self._norm(layer.input_norm, buffers.x, buffers.y)
        yield linear(layer.qkv, buffers.y, buffers.qkv, layer.qkv_bias)
        yield from self._behind_queries(index, layer)

    def _behind_queries(self, index: int, layer: PackedLayer) -> Iterator[Op]:
        """Yield the rest of a layer, once queries, keys and values are there."""
        buffers = self._buffers
        x, window = buffers.x, self._weights.config.windows[index] or 0
        yield self._attention(Code.ROTATE, index, scale=layer.query_norm, bias=layer.key_norm)
        yield self._attention(Code.ATTEND, index, out=buffers.heads, window=window)
        yield linear(layer.out, buffers.heads, x, layer.out_bias, Flag.ADD)
        yield self._norm(layer.mlp_norm, x, buffers.y)
        yield linear(layer.gate_up, buffers.y, buffers.gated, layer.gate_up_bias, Flag.SILU)
        yield linear(layer.down, buffers.gated, x, layer.down_bias, Flag.ADD)

    def _tap(self, layer: int) -> Iterator[Op]:
        for _ in range(self._layers.count(layer)):
            yield copying(self._buffers.x, None)

    def _norm(self, scale: Tensor, source: Tensor, out: Tensor) -> Op:
        config = self._weights.config
        return _op(Code.NORM, n=config.hidden_size, scale=scale, source=source, out=out, eps=config.norm_eps)

    def _attention(self, code: Code, layer: int, **fields: Tensor | int | None) -> Op:
        config = self._weights.config
        return _op(
            code, self._weights.cache_type, layer=layer, source=self._buffers.qkv,
            heads=config.num_heads, kv_heads=config.num_kv_heads, dim=config.head_dim,
            eps=config.norm_eps, factor=config.head_dim**-0.5, **fields,
        )  # fmt: skip


def embedding(table: Weight, out: Tensor) -> Op:
    """Return the operation that looks tokens up in a table packed from [vocabulary, hidden]."""
    return _op(Code.EMBED, table.type, n=table.k, k=table.n, weight=table, out=out)


def copying(source: Tensor, out: Tensor | None) -> Op:
    """Return the operation out = source, of the same width."""
    return _op(Code.COPY, n=source.shape[1], source=source, out=out)


def linear(
    weight: Weight, source: Tensor | None, out: Tensor | None, bias: Tensor | None = None, flags: Flag = Flag.NONE
) -> Op:
    """Return the operation out (+)= source weight^T + bias."""
    return _op(
        Code.LINEAR, weight.type, n=weight.n, k=weight.k, weight=weight, source=source, out=out, bias=bias, flags=flags
    )


def _op(code: Code, type_: Type = Type.F32, **fields: Tensor | Weight | float | None) -> Op:
    values = {name: _address(value) for name, value in fields.items() if value is not None}
    return Op(code=code, type=type_, **values)


def _address(value: Tensor | Weight | float) -> float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value.address if isinstance(value, Weight) else value
