"""A decoder's weights, read and packed for the native program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels import TYPES, Activation, Type, Weight
from speculant.models.description import Attention, DecoderConfig, Embedding, Encoder, Experts, Layer, Mlp
from speculant.models.native.distances import DistanceTable
from speculant.models.native.experts import PackedExperts
from speculant.models.native.inputs import PackedInputs
from speculant.models.native.norms import PackedNorm
from speculant.models.sinusoids import sinusoids
from speculant.models.sizes import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_CROSS,
    BEFORE_MLP,
    CROSS,
    DECODER,
    EMBEDDING_NORM,
    ENCODER,
    ENCODER_LAYER,
    ENCODER_NORM,
    END_ATTENTION,
    END_CROSS,
    END_MLP,
    HEAD,
    HEAD_BIAS,
    LAYER,
    NORM,
    POSITIONS,
    SCALE,
    SELF,
    TABLE,
    TOKEN_INPUTS,
    activations,
    learned_positions,
)
from speculant.models.weights.reader import WeightReader


@dataclass(frozen=True)
class PackedMlp:
    """The weights of a feed-forward block. Vectors are float32; None = it does not have this one.

    inner: gate and up interleaved, or one after the other if their types differ; without gates, up alone.
    """

    of: Mlp
    inner: tuple[Weight, ...]
    inner_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None

    @classmethod
    def read(cls, of: Mlp, mlp: WeightReader) -> PackedMlp:
        """Read and pack a block's weights."""
        names = ("gate_proj", "up_proj") if of.gated else ("up_proj",)
        return cls(
            of=of,
            inner=mlp.interleaved(*(f"{name}.weight" for name in names)),
            inner_bias=mlp.vector(*(f"{name}.bias" for name in names)) if of.bias else None,
            down=mlp.matrix("down_proj.weight"),
            down_bias=mlp.vector("down_proj.bias") if of.bias else None,
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices."""
        return _bytes_of(*self.inner, self.down)

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass reads: all."""
        return self.num_bytes

    @property
    def apart(self) -> bool:
        """Whether the gate is computed separately, because its type differs."""
        return len(self.inner) > 1

    @property
    def activation(self) -> Activation:
        """The kernels' number of the activation."""
        return Activation[self.of.activation.upper()]


@dataclass(frozen=True)
class PackedAttention:
    """The weights of attention that `of` describes. Vectors are float32; None = it does not have this one.

    qkv: the matrices of queries, keys and values in this order, or that of queries alone; neighbours of the same type
    are one matrix, unless queries are apart.
    """

    of: Attention
    qkv: tuple[Weight, ...]
    qkv_bias: Tensor | None
    query_norm: PackedNorm | None
    key_norm: PackedNorm | None
    value_norm: PackedNorm | None
    sinks: Tensor | None
    distances: DistanceTable | None
    out: Weight
    out_bias: Tensor | None

    @classmethod
    def read(cls, of: Attention, weights: WeightReader, *, queries_apart: bool = False) -> PackedAttention:
        """Read and pack the weights, without a table of distances that it shares."""
        projections = ("q_proj", "k_proj", "v_proj") if of.own_kv_heads else ("q_proj",)
        groups = (projections[:1], projections[1:]) if queries_apart else (projections,)
        key_norm, value_norm = (of.qk_norm, of.value_norm) if of.own_kv_heads else (None, None)
        return cls(
            of=of,
            qkv=tuple(matrix for names in groups for matrix in weights.matrices(*(f"{name}.weight" for name in names))),
            qkv_bias=weights.vector(*(f"{name}.bias" for name in projections)) if of.bias else None,
            query_norm=PackedNorm.read(of.qk_norm, weights, "q_norm"),
            key_norm=PackedNorm.read(key_norm, weights, "k_norm"),
            value_norm=PackedNorm.read(value_norm, weights, "v_norm", of.head_dim),
            sinks=weights.vector("sinks") if of.sinks else None,
            distances=DistanceTable.read(of.distances, weights),
            out=weights.matrix("o_proj.weight"),
            out_bias=weights.vector("o_proj.bias") if of.output_bias else None,
        )

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """All its matrices."""
        return (*self.qkv, self.out)

    @property
    def read_matrices(self) -> tuple[Weight, ...]:
        """Those that a pass of the decoder reads: keys and values of a source are computed by the encoder's pass."""
        return (self.qkv[0], self.out) if self.of.source else self.matrices

    @property
    def query_bias(self) -> Tensor | None:
        """The bias of queries."""
        return None if self.qkv_bias is None else self.qkv_bias[: self.of.query_size]

    @property
    def key_bias(self) -> Tensor | None:
        """The bias of keys and values."""
        return None if self.qkv_bias is None else self.qkv_bias[self.of.query_size :]


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer that `of` describes. None = it does not have this one.

    scale: the factor of the residual stream at the end.
    """

    of: Layer
    before_attention: PackedNorm | None
    attention: PackedAttention
    after_attention: PackedNorm | None
    before_cross: PackedNorm | None
    cross: PackedAttention | None
    before_mlp: PackedNorm | None
    mlp: PackedMlp | PackedExperts
    after_mlp: PackedNorm | None
    end_attention: PackedNorm | None = None
    end_cross: PackedNorm | None = None
    end_mlp: PackedNorm | None = None
    inputs: PackedInputs | None = None
    scale: float = 1.0

    @classmethod
    def read(cls, of: Layer, layer: WeightReader, *, queries_apart: bool = False) -> PackedLayer:
        """Read and pack a layer's weights."""
        mlp, cross = layer.inside("mlp."), layer.inside(CROSS)
        return cls(
            of=of,
            before_attention=PackedNorm.read(of.before_attention, layer, BEFORE_ATTENTION),
            attention=PackedAttention.read(of.attention, layer.inside(SELF), queries_apart=queries_apart),
            after_attention=PackedNorm.read(of.after_attention, layer, AFTER_ATTENTION),
            before_cross=PackedNorm.read(of.before_cross, layer, BEFORE_CROSS),
            cross=PackedAttention.read(of.cross, cross, queries_apart=True) if of.cross else None,
            before_mlp=PackedNorm.read(of.before_mlp, layer, BEFORE_MLP),
            mlp=PackedExperts.read(of.mlp, mlp) if isinstance(of.mlp, Experts) else PackedMlp.read(of.mlp, mlp),
            after_mlp=PackedNorm.read(of.after_mlp, layer, AFTER_MLP),
            end_attention=PackedNorm.read(of.end_attention, layer, END_ATTENTION),
            end_cross=PackedNorm.read(of.end_cross, layer, END_CROSS),
            end_mlp=PackedNorm.read(of.end_mlp, layer, END_MLP),
            inputs=PackedInputs.read(of.token_inputs, layer.inside(TOKEN_INPUTS)),
            scale=_read_scale(layer) if of.scaled else 1.0,
        )

    @classmethod
    def read_all(cls, layers: Sequence[Layer], weights: WeightReader, name: str) -> list[PackedLayer]:
        """Read and pack layers, whose tensors' names begin with `name`, with tables of distances that they share."""
        found = list[PackedLayer]()
        for index, of in enumerate(layers):
            layer, distances = cls.read(of, weights.inside(name.format(index))), of.attention.distances
            if distances and distances.shares is not None:
                shared = found[distances.shares].attention.distances
                layer = replace(layer, attention=replace(layer.attention, distances=shared))
            found.append(layer)
        return found

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of one row reads."""
        read = (*self.attention.matrices, *(self.cross.read_matrices if self.cross else ()))
        return _bytes_of(*read, *self._input_matrices) + self.mlp.bytes_per_pass

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices, the table of the inputs included."""
        tables = [self.inputs.table] if self.inputs else []
        own = (*self.attention.matrices, *(self.cross.matrices if self.cross else ()))
        return _bytes_of(*own, *self._input_matrices, *tables) + self.mlp.num_bytes

    @property
    def _input_matrices(self) -> tuple[Weight, ...]:
        return self.inputs.matrices if self.inputs else ()


def _bytes_of(*weights: Weight) -> int:
    return sum(weight.memory.numel() for weight in weights)


def _read_scale(layer: WeightReader) -> float:
    """Read the factor of the residual stream. Raises ModelError for 0, which would delete it."""
    scale = float(layer.vector(SCALE))
    if scale == 0:
        raise ModelError("a layer multiplies the residual stream by 0", "download the checkpoint again.")
    return scale


class PackedEmbedding(NamedTuple):
    """The parts of input embeddings besides the table of tokens. positions: vectors [positions, hidden] by position."""

    positions: Tensor | None
    norm: PackedNorm | None

    @classmethod
    def read(cls, of: Embedding, weights: WeightReader, beginning: str) -> PackedEmbedding:
        """Read the vectors, whose names begin with `beginning`."""
        positions = weights.vector(f"{beginning}{POSITIONS}.weight") if learned_positions(of) else None
        if of.positions and of.sinusoids:
            positions = sinusoids(torch.arange(of.positions), of.hidden_size)
        return cls(positions, PackedNorm.read(of.norm, weights, beginning + EMBEDDING_NORM))


NO_EMBEDDING = PackedEmbedding(None, None)


class PackedEncoder(NamedTuple):
    """All weights of an encoder, whose table is the decoder's."""

    embedding: PackedEmbedding
    layers: list[PackedLayer]
    norm: PackedNorm

    @classmethod
    def read(cls, encoder: Encoder | None, of: Embedding, weights: WeightReader) -> PackedEncoder | None:
        """Read and pack an encoder's weights; None = the model has none."""
        if encoder is None:
            return None
        norm = PackedNorm.read(encoder.norm, weights, ENCODER_NORM.removesuffix(".weight"))
        assert norm is not None
        embedding = PackedEmbedding.read(of, weights, ENCODER)
        return cls(embedding, PackedLayer.read_all(encoder.layers, weights, ENCODER_LAYER), norm)


@dataclass(frozen=True)
class PackedDecoder:
    """All weights of a decoder. A tied head is the table. encoder: that of an encoder-decoder model."""

    config: DecoderConfig
    cache_type: Type
    table: Weight
    head: Weight
    norm: PackedNorm | None
    layers: list[PackedLayer]
    embedding: PackedEmbedding = NO_EMBEDDING
    head_bias: Tensor | None = None
    encoder: PackedEncoder | None = None

    @classmethod
    def read(cls, config: DecoderConfig, weights: WeightReader) -> PackedDecoder:
        """Read and pack a decoder's weights, one tensor at a time."""
        table = weights.decoding_ordered(TABLE).matrix(TABLE)
        head = table if config.head.tied else weights.matrix(HEAD)
        norm = PackedNorm.read(config.norm, weights, NORM.removesuffix(".weight"))
        layers = PackedLayer.read_all(config.layers, weights, LAYER)
        embedding = PackedEmbedding.read(config.embedding, weights, DECODER)
        bias = weights.vector(HEAD_BIAS) if config.head.bias else None
        encoder = PackedEncoder.read(config.encoder, config.embedding, weights)
        return cls(config, TYPES[weights.types.dtype], table, head, norm, layers, embedding, bias, encoder)

    @property
    def every_layer(self) -> list[PackedLayer]:
        """The decoder's layers, then the encoder's."""
        return [*self.layers, *(self.encoder.layers if self.encoder else ())]

    @property
    def activations(self) -> dict[str, int]:
        """The width of each array that a pass fills for a row."""
        widths = activations(self.config)
        apart = any(layer.mlp.apart for layer in self.every_layer)
        return widths | ({"gates": widths["gated"]} if apart else {})

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of one row reads, padding included: a lower bound of any pass's time."""
        return sum(layer.bytes_per_pass for layer in self.layers) + self.head.memory.numel()

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices, padding included; a head that is the table counts once."""
        ends = [self.table] if self.head is self.table else [self.table, self.head]
        return sum(layer.num_bytes for layer in self.every_layer) + _bytes_of(*ends)
