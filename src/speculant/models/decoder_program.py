"""A decoder's pass as a program for the native kernels: recorded once over fixed buffers, replayed in one call.

x      the residual stream               [T, hidden]
y      x behind a norm                   [T, hidden]
qkv    queries, keys and values          [T, (heads + 2 kv_heads) head_dim]
heads  what attention brought together   [T, heads head_dim]
gated  the feed-forward's inside         [T, intermediate]
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels.native import TYPES, Code, Flag, Kernels, Op, Type, Weight
from speculant.models.config import DecoderConfig
from speculant.models.decoder import Decoder


class Parameters:
    """A decoder's parameters by name, each of which is taken once and freed by whoever took it.

    A parameter that nobody takes would make the packed decoder another model: `finish` refuses to leave one behind.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._left: dict[str, Tensor] = dict(decoder.named_parameters())

    def take(self, name: str) -> Tensor:
        """Return a parameter. Raises KeyError if the decoder has none of this name, or it was taken before."""
        return self._left.pop(name).detach()

    def vector(self, *names: str) -> Tensor:
        """Take vectors and return them end to end, in float32."""
        return torch.cat([self.take(name) for name in names]).float()

    def finish(self) -> None:
        """Check that every parameter was taken. Raises ModelError."""
        if self._left:
            raise ModelError(
                f"the native program does not use {len(self._left)} of the model's tensors, such as {min(self._left)}",
                'load the model with kernels="reference", and report this.',
            )


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
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None

    @classmethod
    def pack(
        cls, parameters: Parameters, layer: str, config: DecoderConfig, kernels: Kernels, type_: Type
    ) -> PackedLayer:
        """Take a layer's parameters, whose names begin with `layer`, and pack them."""

        def vector(*names: str) -> Tensor:
            return parameters.vector(*(f"{layer}.{name}" for name in names))

        def take(name: str) -> Tensor:
            return parameters.take(f"{layer}.{name}.weight")

        q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
        return cls(
            input_norm=vector("input_layernorm.weight"),
            qkv=kernels.pack(type_, torch.cat([take(q), take(k), take(v)])),
            qkv_bias=vector(f"{q}.bias", f"{k}.bias", f"{v}.bias") if config.qkv_bias else None,
            query_norm=vector("self_attn.q_norm.weight") if config.qk_norm else None,
            key_norm=vector("self_attn.k_norm.weight") if config.qk_norm else None,
            out=kernels.pack(type_, take(o)),
            out_bias=vector(f"{o}.bias") if config.output_bias else None,
            mlp_norm=vector("post_attention_layernorm.weight"),
            gate_up=kernels.pack(type_, take(gate), take(up)),
            gate_up_bias=vector(f"{gate}.bias", f"{up}.bias") if config.mlp_bias else None,
            down=kernels.pack(type_, take(down)),
            down_bias=vector(f"{down}.bias") if config.mlp_bias else None,
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
    def take(cls, decoder: Decoder, kernels: Kernels, quantization: Type | None) -> PackedDecoder:
        """Pack a decoder's weights and drop its own, one by one: it can't be run afterwards.

        Raises ModelError if it has a tensor that no operation uses.
        """
        plain, config = TYPES[decoder.cache_shape.dtype], decoder.config
        type_ = plain if quantization is None else quantization
        parameters = Parameters(decoder)
        del decoder.model, decoder.lm_head
        table, head = _pack_ends(parameters, config, kernels, plain, type_)
        norm = parameters.vector("model.norm.weight")
        layers = [
            PackedLayer.pack(parameters, f"model.layers.{index}", config, kernels, type_)
            for index in range(config.num_layers)
        ]
        parameters.finish()
        return cls(config, plain, table, head, norm, layers)

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass reads, padding included, whatever it is run on: the floor of its time."""
        matrices = [weight for layer in self.layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(weight.memory.numel() for weight in [*matrices, self.head])


def _pack_ends(
    parameters: Parameters, config: DecoderConfig, kernels: Kernels, plain: Type, type_: Type
) -> tuple[Weight, Weight]:
    """Pack the table and the head, which are one matrix if they are tied and of one type."""
    embeddings = parameters.take("model.embed_tokens.weight")
    table = kernels.pack(plain, embeddings)
    if not config.tie_embeddings:
        return table, kernels.pack(type_, parameters.take("lm_head.weight"))
    return table, table if type_ == plain else kernels.pack(type_, embeddings)


class Buffers:
    """What a pass of up to `room` rows works in."""

    def __init__(self, config: DecoderConfig, room: int) -> None:
        self.room = room
        self.x, self.y = torch.empty(room, config.hidden_size), torch.empty(room, config.hidden_size)
        self.qkv = torch.empty(room, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self.heads = torch.empty(room, config.num_heads * config.head_dim)
        self.gated = torch.empty(room, config.intermediate_size)


class Program:
    """A pass, recorded over buffers that programs share; they hold one pass at a time.

    It leaves its result in `hidden` [room, hidden], and in taps[i] [room, hidden] what enters layer `layers[i]`
    (the number of layers = what leaves the last one).
    """

    def __init__(self, weights: PackedDecoder, buffers: Buffers, layers: Sequence[int] = ()) -> None:
        self.hidden = buffers.y
        self.taps = tuple(torch.empty_like(buffers.x) for _ in layers)
        self._weights, self._buffers, self._layers = weights, buffers, layers
        recorded = list(self._record())
        self.ops: ctypes.Array[Op] = (Op * len(recorded))(*recorded)

    def _record(self) -> Iterator[Op]:
        weights, buffers = self._weights, self._buffers
        x, y = buffers.x, buffers.y
        yield embedding(weights.table, x)
        for index, layer in enumerate(weights.layers):
            yield from self._tap(index)
            yield self._norm(layer.input_norm)
            yield linear(layer.qkv, y, buffers.qkv, layer.qkv_bias)
            yield self._attention(Code.ROTATE, index, scale=layer.query_norm, bias=layer.key_norm)
            yield self._attention(Code.ATTEND, index, out=buffers.heads, window=weights.config.windows[index] or 0)
            yield linear(layer.out, buffers.heads, x, layer.out_bias, Flag.ADD)
            yield self._norm(layer.mlp_norm)
            yield linear(layer.gate_up, y, buffers.gated, layer.gate_up_bias, Flag.SILU)
            yield linear(layer.down, buffers.gated, x, layer.down_bias, Flag.ADD)
        yield from self._tap(len(weights.layers))
        yield self._norm(weights.norm)

    def _tap(self, layer: int) -> Iterator[Op]:
        for tapped, out in zip(self._layers, self.taps, strict=True):
            if tapped == layer:
                yield _op(Code.COPY, n=self._weights.config.hidden_size, source=self._buffers.x, out=out)

    def _norm(self, scale: Tensor) -> Op:
        config, buffers = self._weights.config, self._buffers
        return _op(Code.NORM, n=config.hidden_size, scale=scale, source=buffers.x, out=buffers.y, eps=config.norm_eps)

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
