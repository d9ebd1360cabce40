"""A decoder's pass as a program for the native kernels: recorded once over fixed buffers, replayed in one call.

x      the residual stream               [T, hidden]
y      x behind a norm                   [T, hidden]
qkv    queries, keys and values          [T, (heads + 2 kv_heads) head_dim]
heads  what attention brought together   [T, heads head_dim]
gated  the feed-forward's inside         [T, intermediate]
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.native import TYPES, Code, Flag, Op, Type, Weight
from speculant.models.config import DecoderConfig
from speculant.models.weight_reader import WeightReader


@dataclass(frozen=True)
class PackedLayer:
    """One layer's weights; vectors are float32, None = the family has none."""

    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight
    down_bias: Tensor | None

    @classmethod
    def read(cls, layer: WeightReader, type_: Type) -> PackedLayer:
        """Read and pack a layer's weights."""
        attention, mlp = layer.inside("self_attn."), layer.inside("mlp.")
        return cls(
            input_norm=layer.vector("input_layernorm.weight"),
            qkv=attention.matrix(type_, "q_proj.weight", "k_proj.weight", "v_proj.weight"),
            qkv_bias=attention.optional("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            query_norm=attention.optional("q_norm.weight"),
            key_norm=attention.optional("k_norm.weight"),
            out=attention.matrix(type_, "o_proj.weight"),
            out_bias=attention.optional("o_proj.bias"),
            mlp_norm=layer.vector("post_attention_layernorm.weight"),
            gate_up=mlp.in_turn(type_, "gate_proj.weight", "up_proj.weight"),
            down=mlp.matrix(type_, "down_proj.weight"),
            down_bias=mlp.optional("down_proj.bias"),
        )


@dataclass(frozen=True)
class PackedDecoder:
    """All weights of a decoder. The table that tokens are looked up in is never quantised."""

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
        """How many bytes of weights a pass reads, padding included, whatever it is run on: the floor of its time."""
        matrices = [weight for layer in self.layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(weight.memory.numel() for weight in [*matrices, self.head])


class Program:
    """A pass of up to `room` rows, recorded; `hidden` [room, hidden] is where it leaves its result."""

    def __init__(self, weights: PackedDecoder, room: int) -> None:
        config = weights.config
        self.room = room
        self._x, self.hidden = torch.empty(room, config.hidden_size), torch.empty(room, config.hidden_size)
        self._qkv = torch.empty(room, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self._heads = torch.empty(room, config.num_heads * config.head_dim)
        self._gated = torch.empty(room, config.intermediate_size)
        self._weights = weights
        recorded = list(self._record())
        self.ops: ctypes.Array[Op] = (Op * len(recorded))(*recorded)

    def _record(self) -> Iterator[Op]:
        weights, x, y = self._weights, self._x, self.hidden
        yield _op(Code.EMBED, weights.table.type, n=weights.table.k, k=weights.table.n, weight=weights.table, out=x)
        for index, layer in enumerate(weights.layers):
            yield self._norm(layer.input_norm)
            yield linear(layer.qkv, y, self._qkv, layer.qkv_bias)
            yield self._attention(Code.ROTATE, index, scale=layer.query_norm, bias=layer.key_norm)
            yield self._attention(Code.ATTEND, index, out=self._heads, window=weights.config.windows[index] or 0)
            yield linear(layer.out, self._heads, x, layer.out_bias, Flag.ADD)
            yield self._norm(layer.mlp_norm)
            yield linear(layer.gate_up, y, self._gated, None, Flag.SILU)
            yield linear(layer.down, self._gated, x, layer.down_bias, Flag.ADD)
        yield self._norm(weights.norm)

    def _norm(self, scale: Tensor) -> Op:
        config = self._weights.config
        return _op(Code.NORM, n=config.hidden_size, scale=scale, source=self._x, out=self.hidden, eps=config.norm_eps)

    def _attention(self, code: Code, layer: int, **fields: Tensor | int | None) -> Op:
        config = self._weights.config
        return _op(
            code, self._weights.cache_type, layer=layer, source=self._qkv,
            heads=config.num_heads, kv_heads=config.num_kv_heads, dim=config.head_dim,
            eps=config.norm_eps, factor=config.head_dim**-0.5, **fields,
        )  # fmt: skip


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
