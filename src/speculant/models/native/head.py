"""A head with layers of its own (models/heads.py) on the native kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import CacheShape, KVCache, KVStorage
from speculant.kernels import Arena, Draft, Flag, Op, Weight
from speculant.models.base import Batch, Chain, Hidden
from speculant.models.description import Columns, DecoderConfig, TensorMap
from speculant.models.heads import HeadConfig, StateEntry, head_cache_shape
from speculant.models.native.decoder import NativeDecoder
from speculant.models.native.packed import (
    PackedDecoder,
    PackedLayer,
    PackedNorm,
    copying,
    embedding,
    linear,
    linears,
    normalising,
)
from speculant.models.native.program import Buffers, Program
from speculant.models.sizes import BEFORE_ATTENTION
from speculant.models.weights.reader import WeightReader, WeightTypes
from speculant.models.weights.source import Mapped, WeightSource
from speculant.sampling import copied

_QUERIES = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _halves(weights: WeightSource, double: frozenset[str]) -> list[Mapped]:
    """Return the sources of the columns for e, and of those for h, of the matrices `double`, which multiply [e; h]."""
    shapes = {name: weights.shape(name) for name in weights.names()}
    widths = {name: shapes[name][1] for name in double & shapes.keys()}
    halved = {name: (shapes[name][0], width // 2) for name, width in widths.items()}
    return [
        Mapped(weights, {**shapes, **halved}, TensorMap(tuple(
            (name, Columns(name, index * (width // 2), width // 2, width)) for name, width in widths.items()
        )))
        for index in (0, 1)
    ]  # fmt: skip


def _double(config: HeadConfig) -> frozenset[str]:
    names = [f"layers.0.self_attn.{name}" for name in _QUERIES] if _by_attention(config) else ["fc.weight"]
    return frozenset(names)


@dataclass(frozen=True)
class PackedHead:
    """All weights of a head. `decoder` has its layers; with CONTEXT there is nothing else.

    hidden: the matrices that multiply h, in order. With INPUT and NORMED, `embedded` multiplies e and may have a bias.
    With ATTENTION the first layer's matrices in `decoder` multiply e. token_norm, hidden_norm: the norms of e and h.
    """

    config: HeadConfig
    decoder: PackedDecoder
    hidden: tuple[Weight, ...]
    embedded: Weight | None = None
    bias: Tensor | None = None
    hidden_norm: PackedNorm | None = None
    token_norm: PackedNorm | None = None

    @classmethod
    def read(cls, config: HeadConfig, weights: WeightSource, target: NativeDecoder) -> PackedHead:
        """Read and pack a head's weights; table and output head are the target's unless it has its own.

        Matrices are rounded to the target's `head_rounding`; a table never is, because a pass reads a row of it.
        """
        host, kernels, dtype = target.packed, target.kernels, target.cache_shape.dtype
        own, arena = config.decoder, Arena(kernels.touch)
        names = {name.removesuffix(".weight") for name in weights.names()}
        of_e, of_h = (
            WeightReader(WeightTypes(half, dtype), kernels, arena, rounded=target.head_rounding)
            for half in _halves(weights, _double(config))
        )
        decoder = PackedDecoder(
            config=_with_parts_of(host.config, config),
            cache_type=host.cache_type,
            table=of_e.unrounded().matrix("embed_tokens") if config.own_table else host.table,
            head=of_e.matrix("lm_head.weight") if config.own_head else host.head,
            head_bias=None if config.own_head else host.head_bias,
            norm=None if config.entry is StateEntry.INPUT else PackedNorm.read(own.norm, of_e, "norm"),
            layers=[
                PackedLayer.read(of, of_e.inside(f"layers.{i}."), queries_apart=config.entry is StateEntry.CONTEXT)
                for i, of in enumerate(config.layers)
            ],
        )
        if config.entry is StateEntry.CONTEXT:
            return cls(config, decoder, ())
        norms = tuple(
            PackedNorm.read(own.norm, of_e, name) if name in names else None for name in ("hidden_norm", "token_norm")
        )
        if _by_attention(config):
            return cls(config, decoder, of_h.inside("layers.0.self_attn.").matrices(*_QUERIES), None, None, *norms)
        bias = of_e.vector("fc.bias") if config.fc_bias else None
        return cls(config, decoder, of_h.matrices("fc.weight"), of_e.matrix("fc.weight"), bias, *norms)


def _with_parts_of(host: DecoderConfig, config: HeadConfig) -> DecoderConfig:
    """Return a head's description with the factors of the target's table and head, where it has none of its own."""
    own = config.decoder
    own_scale = config.own_table or config.entry is StateEntry.CONTEXT
    scale = own.embedding.scale if own_scale else host.embedding.scale
    head = own.head if config.own_head else replace(own.head, scale=host.head.scale, softcap=host.head.softcap)
    return replace(own, embedding=replace(own.embedding, scale=scale), head=head)


def _by_attention(config: HeadConfig) -> bool:
    return config.entry is StateEntry.ATTENTION


class HeadProgram(Program):
    """A recorded pass of a head. `states` [room, hidden] takes the rows' hidden states before it runs.

    The output head reads `hidden` [room, hidden], and the next rows read `carried`.
    """

    def __init__(self, weights: PackedHead, buffers: Buffers) -> None:
        self._head = weights
        self.states = torch.empty_like(buffers.x)
        super().__init__(weights.decoder, buffers)
        config = weights.config
        self.hidden = buffers.x if config.entry is StateEntry.INPUT else buffers.y
        self.carried = self.hidden if config.norm_output else buffers.x

    def _record(self) -> Iterator[Op]:
        decoder, buffers = self._head.decoder, self._buffers
        if _by_attention(self._head.config):
            yield from self._enter_by_attention()
            yield from self._after_queries(0, decoder.layers[0])
        else:
            yield from self._enter_by_input()
            yield from self._layer(0, decoder.layers[0])
        for index, layer in enumerate(decoder.layers[1:], 1):
            yield from self._layer(index, layer)
        if decoder.norm:
            yield normalising(decoder.norm, buffers.x, buffers.y)

    def _enter_by_input(self) -> Iterator[Op]:
        head, buffers, states = self._head, self._buffers, self.states
        assert head.embedded is not None
        entering = buffers.x if head.token_norm else buffers.y
        yield embedding(head.decoder.table, entering, head.decoder.config.embedding.scale)
        if head.token_norm:
            yield normalising(head.token_norm, entering, buffers.y)
        yield linear(head.embedded, buffers.y, buffers.x, head.bias)
        if head.hidden_norm:
            yield normalising(head.hidden_norm, states, buffers.y)
            states = buffers.y
        yield from linears(head.hidden, states, buffers.x, flags=Flag.ADD)

    def _enter_by_attention(self) -> Iterator[Op]:
        head, buffers, first = self._head, self._buffers, self._head.decoder.layers[0]
        assert head.hidden_norm is not None
        yield embedding(head.decoder.table, buffers.x, head.decoder.config.embedding.scale)
        yield normalising(first.norms[BEFORE_ATTENTION], buffers.x, buffers.y)
        yield from linears(first.attention.qkv, buffers.y, buffers.qkv, first.attention.qkv_bias)
        normed = head.config.norm_before_residual
        yield normalising(head.hidden_norm, self.states, buffers.y, copy=None if normed else buffers.x)
        yield from linears(head.hidden, buffers.y, buffers.qkv, flags=Flag.ADD)
        if normed:
            yield copying(buffers.y, buffers.x)


class ContextProgram(Program):
    """A recorded pass over states, which are in the buffer `x`: each layer's keys and values of them are stored."""

    def __init__(self, weights: PackedDecoder, buffers: Buffers) -> None:
        self.buffers = buffers
        super().__init__(weights, buffers)

    def _record(self) -> Iterator[Op]:
        for index, layer in enumerate(self._weights.layers):
            yield from self._keys(index, layer.attention, self.buffers.x)


class NativeBlockHead(NativeDecoder):
    """A head with `StateEntry.CONTEXT`: a decoder, whose cache also gets keys and values of states."""

    def __init__(self, config: HeadConfig, weights: WeightSource, target: NativeDecoder) -> None:
        self._begin(PackedHead.read(config, weights, target).decoder, target.cache_shape.dtype, target.kernels)
        self._context: ContextProgram | None = None

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """Rows of states have no result."""
        if batch.hidden is None:
            return super().forward(batch, storage, taps)
        layout, rows = self.layout(batch, storage), len(batch.tokens)
        buffers = self._buffers
        if self._context is None or self._context.buffers is not buffers:
            self._context = self._checked(ContextProgram(self.packed, buffers))
        buffers.x[:rows] = batch.hidden
        self.kernels.run(self._context.ops, layout.on)
        return Hidden(buffers.x[:0])

    @override
    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """This head draws none by itself."""
        return chains


class NativeHead(NativeDecoder):
    """A head on the native kernels of its target, whose batches and chains have hidden states."""

    def __init__(self, config: HeadConfig, weights: WeightSource, target: NativeDecoder) -> None:
        self._packed = PackedHead.read(config, weights, target)
        shape: CacheShape = head_cache_shape(config, target)
        self._begin(self._packed.decoder, shape.dtype, target.kernels)

    def _record(self, taps: tuple[int, ...]) -> HeadProgram:
        return HeadProgram(self._packed, self._buffers)

    @property
    def program(self) -> HeadProgram:
        """The pass."""
        made = super().program
        assert isinstance(made, HeadProgram)
        return made

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """There are no taps."""
        assert batch.hidden is not None, "a head reads a hidden state for each row"
        layout, rows = self.layout(batch, storage), len(batch.tokens)
        program = self.program
        program.states[:rows] = batch.hidden
        self.kernels.run(program.ops, layout.on)
        return Hidden(copied(program.hidden[:rows]), carried=copied(program.carried[:rows]))

    @override
    def _entered(self, chains: Sequence[Chain], draft: Draft | None) -> Program:
        program, first = self.program, 0
        for chain in chains:
            assert chain.hidden is not None, "a head reads a hidden state for each row"
            program.states[first : first + len(chain.hidden)] = chain.hidden
            first += len(chain.hidden)
        if draft is not None:
            draft.carried, draft.states = program.carried.data_ptr(), program.states.data_ptr()
            draft.state_size = self.hidden_size
        return program
