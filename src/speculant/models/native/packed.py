"""A decoder's weights, read and packed for the native program, and the program's operations.

Operations do not own tensors and weights: their caller must keep them alive. Some layers have arrays of their own:

embedded   the input embeddings                                [T, hidden]
inputs     a layer's inputs by token, see `TokenInputs`        [T, size]
projected  a term that is added to these, or a factor          [T, size]
scores     the result of a router of experts                   [T, count]
gated      activation(gate) * up of each pair                  [T * used, size]
results    each pair's result                                  [T * used, hidden]

A pair is a row and one of its experts. The kernels select the pairs; csrc/experts.h describes their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels import BLOCK_SIZES, TYPES, Activation, Code, Flag, Op, Sizes, Type, Weight
from speculant.models.description import (
    Attention,
    DecoderConfig,
    DistanceBias,
    Embedding,
    Encoder,
    Experts,
    Layer,
    Mlp,
    Norm,
    State,
    TokenInputs,
)
from speculant.models.functions import exponential
from speculant.models.positions import buckets_of, sinusoids
from speculant.models.sizes import (
    CROSS,
    DECODER,
    DISTANCES,
    EMBEDDING_NORM,
    ENCODER,
    ENCODER_LAYER,
    ENCODER_NORM,
    HEAD,
    HEAD_BIAS,
    LAYER,
    NORM,
    POSITIONS,
    SCALE,
    SELF,
    STATE,
    TABLE,
    TOKEN_INPUTS,
    TOKEN_TABLE,
    activations,
    layer_norms,
    learned_positions,
)
from speculant.models.weights.reader import WeightReader


def embedding(
    table: Weight, out: Tensor, factor: float = 1.0, learned: Tensor | None = None, flags: Flag = Flag.NONE
) -> Op:
    """Return the operation that looks tokens up in a table packed from [vocabulary, hidden].

    learned: rows [positions, hidden] that are added by position. With the flag TOKENS, rows with input embeddings of
    their own are looked up too.
    """
    return make_op(
        Code.EMBED, table.type, n=table.k, k=table.n, weight=table, out=out, factor=factor, learned=learned, flags=flags
    )  # fmt: skip


def copying(source: Tensor, out: Tensor, factor: float = 1.0) -> Op:
    """Return the operation out = factor * source, of the same width."""
    return make_op(Code.COPY, n=source.shape[1], source=source, out=out, factor=factor)


def gating(source: Tensor, out: Tensor, n: int, activation: Activation, flags: Flag = Flag.NONE) -> Op:
    """Return the operation out = activation(source) * out, of rows of n numbers, or of 1 in `source` with EACH."""
    return make_op(Code.GATE, n=n, source=source, out=out, activation=activation, flags=flags)


def linear(
    weight: Weight, source: Tensor | None, out: Tensor | None, bias: Tensor | None = None, flags: Flag = Flag.NONE,
    *, activation: Activation = Activation.NONE, factor: float = 1.0, softcap: float | None = None,
) -> Op:  # fmt: skip
    """Return the operation out (+)= activation(factor * (source weight^T + bias)), limited by a soft cap if given.

    With the flag GATED the operation is out = activation(gate) * up instead, from the same source, without factor and
    soft cap.
    """
    return make_op(
        Code.LINEAR, weight.type, n=weight.n, k=weight.k, weight=weight, source=source, out=out, bias=bias,
        flags=flags | (Flag.ALIKE if weight.alike else Flag.NONE), activation=activation, factor=factor,
        softcap=softcap, order=weight.order,
    )  # fmt: skip


def linears(
    weights: Sequence[Weight], source: Tensor, out: Tensor, bias: Tensor | None = None, flags: Flag = Flag.NONE
) -> Iterator[Op]:
    """Yield the operations of a matrix that consists of these weights, by rows; each writes its own columns."""
    first = 0
    for weight in weights:
        own = None if bias is None else bias[first : first + weight.n]
        op = linear(weight, source, out[:, first:], own, flags)
        op.stride = out.stride(0)
        yield op
        first += weight.n


def make_op(code: Code, type_: Type = Type.F32, **fields: Tensor | Weight | float | None) -> Op:
    """Return an operation; None = a field is not set. It does not keep tensors and weights alive."""
    values = {name: _address(value) for name, value in fields.items() if value is not None}
    arrays = {name: value for name, value in fields.items() if isinstance(value, Tensor | Weight)}
    return Op(code=code, type=type_, has=Sizes(**{name: _extent(value) for name, value in arrays.items()}), **values)


def _extent(array: Tensor | Weight) -> int:
    """Return the bytes of a weight, or the number of a tensor's items from the first to the last, gaps included."""
    if isinstance(array, Weight):
        return array.memory.numel()
    gaps = zip(array.shape, array.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in gaps) if array.numel() else 0


def _address(value: Tensor | Weight | float) -> float:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value.address if isinstance(value, Weight) else value


class PackedNorm(NamedTuple):
    """The vectors of a norm, in float32. `scale` includes the description's offset."""

    of: Norm
    scale: Tensor
    bias: Tensor | None

    @classmethod
    def read(cls, of: Norm, weights: WeightReader, name: str, width: int = 0) -> PackedNorm:
        """Read a norm's vectors, which are called name.weight and name.bias. width: that of a norm without scales."""
        scale = weights.vector(f"{name}.weight") if of.scaled else torch.ones(width)
        bias = weights.vector(f"{name}.bias") if of.bias else None
        return cls(of, scale + of.offset if of.offset else scale, bias)

    @property
    def flag(self) -> Flag:
        """The kind of norm."""
        return Flag.CENTRED if self.of.kind == "layer" else Flag.NONE


def normalising(
    norm: PackedNorm, source: Tensor, out: Tensor, flags: Flag = Flag.NONE, *, copy: Tensor | None = None,
    factor: float = 1.0,
) -> Op:  # fmt: skip
    """Return the operation out = norm(source), or out += factor * norm(source) with the flag ADD.

    copy: where `source` is copied to.
    """
    return make_op(
        Code.NORM, n=len(norm.scale), scale=norm.scale, bias=norm.bias, eps=norm.of.eps, source=source, out=out,
        copy=copy, flags=flags | norm.flag, factor=factor,
    )  # fmt: skip


class DistanceTable(NamedTuple):
    """The numbers of the distances from -before to after, whose ends stand for all distances beyond.

    A distance is the position of a key minus that of a row.
    """

    numbers: Tensor  # float32 [heads, before + 1 + after]
    before: int
    after: int

    @classmethod
    def read(cls, of: DistanceBias | None, attention: WeightReader) -> DistanceTable | None:
        """Read a layer's table; None = it has none, or shares another layer's."""
        if of is None or of.shares is not None:
            return None
        before, after = of.max_distance, of.max_distance if of.both_ways else 0
        buckets = buckets_of(of, torch.arange(before, -after - 1, -1))
        by_bucket = attention.vector(DISTANCES)  # [buckets, heads]
        return cls(by_bucket[buckets].T.contiguous(), before, after)


@dataclass(frozen=True)
class PackedInputs:
    """The weights of a layer's inputs by token. The table is never rounded."""

    of: TokenInputs
    table: Weight
    projection: Weight
    norm: PackedNorm
    gate: Weight
    out: Weight
    output_norm: PackedNorm

    @classmethod
    def read(cls, of: TokenInputs | None, inputs: WeightReader) -> PackedInputs | None:
        """Read and pack the weights; None = the layer has none."""
        if of is None:
            return None
        return cls(
            of=of,
            table=inputs.unrounded().matrix(TOKEN_TABLE),
            projection=inputs.matrix("projection.weight"),
            norm=PackedNorm.read(of.norm, inputs, "norm"),
            gate=inputs.matrix("gate_proj.weight"),
            out=inputs.matrix("out_proj.weight"),
            output_norm=PackedNorm.read(of.norm, inputs, "output_norm"),
        )

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """All its matrices but the table."""
        return (self.projection, self.gate, self.out)


def adding_inputs(
    layer: PackedInputs, x: Tensor, y: Tensor, embedded: Tensor, inputs: Tensor, projected: Tensor
) -> Iterator[Op]:
    """Yield the operations that add a layer's inputs to x; y is scratch memory."""
    of = layer.of
    yield embedding(layer.table, inputs, of.table_factor * of.factor, flags=Flag.TOKENS)
    yield linear(layer.projection, embedded, projected, factor=of.projection_factor)
    yield normalising(layer.norm, projected, inputs, Flag.ADD, factor=of.factor)
    yield linear(layer.gate, x, projected)
    yield gating(projected, inputs, of.size, Activation[of.activation.upper()])
    yield linear(layer.out, inputs, y)
    yield normalising(layer.output_norm, y, x, Flag.ADD)


def expert_matrices(of: Experts) -> list[list[str]]:
    """Return the names of all experts' gates, those of their matrices up, and down, in the module `mlp`."""
    return [
        [f"experts.{index}.{matrix}.weight" for index in range(of.count)]
        for matrix in ("gate_proj", "up_proj", "down_proj")
    ]


@dataclass(frozen=True)
class ExpertMatrices:
    """A matrix of each expert, all of the same type and shape, and without an order of inputs."""

    weights: Sequence[Weight]

    @cached_property
    def addresses(self) -> Tensor:
        """The address of each matrix."""
        return torch.tensor([weight.address for weight in self.weights], dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """The bytes of all."""
        return sum(weight.memory.numel() for weight in self.weights)


@dataclass(frozen=True)
class PackedExperts:
    """The weights of a layer's router and experts. Biases are float32, by expert; None = it has none.

    The router is never rounded, because its scores decide which experts are used, nor is `shared_gate`. inner: gate and
    up interleaved, or one after the other if their types differ. favours: see `Experts`.
    """

    of: Experts
    router: Weight
    router_bias: Tensor | None
    inner: Sequence[ExpertMatrices]
    inner_bias: Tensor | None  # [count, 2, size]
    down: ExpertMatrices
    down_bias: Tensor | None  # [count, hidden]
    favours: Tensor | None = None
    shared: PackedMlp | None = None
    shared_gate: Weight | None = None

    @classmethod
    def read(cls, of: Experts, mlp: WeightReader) -> PackedExperts:
        """Read and pack the weights, one expert after the other."""
        inner, down, biases = list[tuple[Weight, ...]](), list[Weight](), list[tuple[Tensor, Tensor]]()
        router = mlp.unrounded().matrix("router.weight")
        experts = mlp.unified(*expert_matrices(of))
        for index in range(of.count):
            one = experts.inside(f"experts.{index}.")
            inner.append(one.interleaved("gate_proj.weight", "up_proj.weight"))
            down.append(one.matrix("down_proj.weight"))
            if of.bias:
                biases.append((one.vector("gate_proj.bias", "up_proj.bias"), one.vector("down_proj.bias")))
        inner_bias, down_bias = (torch.stack(each) for each in zip(*biases, strict=True)) if biases else (None, None)
        return cls(
            of, router, mlp.vector("router.bias") if of.bias else None,
            [ExpertMatrices(each) for each in zip(*inner, strict=True)], inner_bias, ExpertMatrices(down), down_bias,
            mlp.vector("expert_bias") if of.favours else None,
            PackedMlp.read(of.shared, mlp.inside("shared_expert.")) if of.shared else None,
            mlp.unrounded().matrix("shared_expert_gate.weight") if of.shared_gate else None,
        )  # fmt: skip

    @property
    def apart(self) -> bool:
        """Whether some gates are computed separately, because their type differs."""
        return len(self.inner) > 1 or (self.shared is not None and self.shared.apart)

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes a pass of one row reads. Several rows read those of all experts that they use."""
        return self._common_bytes + self._expert_bytes * self.of.used // self.of.count

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices."""
        return self._common_bytes + self._expert_bytes

    @property
    def _common_bytes(self) -> int:
        gates = [self.shared_gate] if self.shared_gate else []
        return _bytes_of(self.router, *gates) + (self.shared.num_bytes if self.shared else 0)

    @property
    def _expert_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.inner, self.down))

    def computing(
        self, source: Tensor, scores: Tensor, gated: Tensor, gates: Tensor | None, results: Tensor
    ) -> Iterator[Op]:
        """Yield the operations that select each row's experts and compute their results from `source` [T, hidden].

        In the end `gated` is that of the shared expert.
        """
        of = self.of
        scored = linear(
            self.router, source, scores, self.router_bias,
            activation=Activation.SIGMOID if of.sigmoid else Activation.NONE,
        )  # fmt: skip
        scored.stride = of.count
        yield scored
        flags = (Flag.RENORMALISE if of.renormalise else Flag.NONE) | (Flag.WEIGHTS if of.sigmoid else Flag.NONE)
        yield make_op(
            Code.ROUTE, n=of.count, source=scores, used=of.used, flags=flags, bias=self.favours, factor=of.factor
        )
        if len(self.inner) == 1:
            yield self._multiplying(
                self.inner[0], source, gated, self.inner_bias, Flag.GATED | Flag.GATHER, **self._activation
            )
        else:
            assert gates is not None
            yield from self._apart(source, gated, gates)
        yield self._multiplying(self.down, gated, results, self.down_bias)
        yield from self._sharing(source, scores, gated, gates)

    def _sharing(self, source: Tensor, scores: Tensor, gated: Tensor, gates: Tensor | None) -> Iterator[Op]:
        """Yield the operations of the shared expert, up to its matrix down."""
        if self.shared:
            yield from self.shared.computing(source, gated, gates)
        if self.shared and self.shared_gate:
            yield linear(self.shared_gate, source, scores)
            yield gating(scores, gated, self.shared.of.size, Activation.SIGMOID, Flag.EACH)

    def _apart(self, source: Tensor, gated: Tensor, gates: Tensor) -> Iterator[Op]:
        biases = (None, None) if self.inner_bias is None else self._apart_biases
        for matrices, out, bias in zip(self.inner, (gates, gated), biases, strict=True):
            yield self._multiplying(matrices, source, out, bias, Flag.GATHER)
        made = gating(gates, gated, self.of.used * self.of.size, Activation.NONE)
        for name, value in self._activation.items():
            setattr(made, name, value)
        yield made

    @cached_property
    def _apart_biases(self) -> tuple[Tensor, Tensor]:
        assert self.inner_bias is not None
        gate, up = self.inner_bias.view(self.of.count, 2, -1).unbind(1)
        return gate.contiguous(), up.contiguous()

    def combining(
        self, results: Tensor, gated: Tensor, out: Tensor, flags: Flag = Flag.NONE, factor: float = 1.0
    ) -> Iterator[Op]:
        """Yield the operations out (+)= factor * (the weighted sum of each row's results + the shared expert's)."""
        yield make_op(
            Code.COMBINE, n=out.shape[1], source=results, out=out, used=self.of.used, flags=flags, factor=factor
        )
        if self.shared:
            yield linear(self.shared.down, gated, out, self.shared.down_bias, Flag.ADD, factor=factor)

    @property
    def _activation(self) -> dict[str, float]:
        clamped = self.of.clamped
        if clamped is None:
            return {"activation": Activation[self.of.activation.upper()]}
        return {"activation": Activation.CLAMPED, "factor": clamped.gain, "softcap": clamped.limit}

    def _multiplying(
        self, matrices: ExpertMatrices, source: Tensor, out: Tensor, bias: Tensor | None, flags: Flag = Flag.NONE,
        **activation: float,
    ) -> Op:  # fmt: skip
        """Return the operation that multiplies each pair by the matrix of its expert."""
        one = matrices.weights[0]
        made = make_op(
            Code.EXPERTS, one.type, n=one.n, k=one.k, weight=matrices.addresses, source=source, out=out, bias=bias,
            used=self.of.used, flags=flags, **activation,
        )  # fmt: skip
        made.has.matrix = min(weight.memory.numel() for weight in matrices.weights)
        return made


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

    def computing(self, source: Tensor, gated: Tensor, gates: Tensor | None) -> Iterator[Op]:
        """Yield the operations that compute the input of the matrix down from `source` [T, hidden]."""
        bias, activation = self.inner_bias, Activation[self.of.activation.upper()]
        if not self.apart:
            flags = Flag.GATED if self.of.gated else Flag.NONE
            yield linear(self.inner[0], source, gated, bias, flags, activation=activation)
            return
        gate, up = self.inner
        assert gates is not None
        yield linear(gate, source, gates, bias)
        yield linear(up, source, gated, None if bias is None else bias[gate.n :])
        yield gating(gates, gated, gate.n, activation)


@dataclass(frozen=True)
class PackedAttention:
    """The weights of attention that `of` describes. Vectors are float32; None = it does not have this one.

    qkv: the matrices of queries, keys and values in this order, or that of queries alone; neighbours of the same type
    are one matrix, unless queries are apart. gate: that of gates of the result.
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
    gate: Weight | None = None
    gate_bias: Tensor | None = None

    @classmethod
    def read(cls, of: Attention, weights: WeightReader, *, queries_apart: bool = False) -> PackedAttention:
        """Read and pack the weights, without a table of distances that it shares."""
        projections = ("q_proj", "k_proj", "v_proj") if of.own_kv_heads else ("q_proj",)
        groups = (projections[:1], projections[1:]) if queries_apart else (projections,)
        norms = {"q_norm": of.qk_norm, **({"k_norm": of.qk_norm, "v_norm": of.value_norm} if of.own_kv_heads else {})}
        packed = {name: PackedNorm.read(norm, weights, name, of.head_dim) for name, norm in norms.items() if norm}
        return cls(
            of=of,
            qkv=tuple(matrix for names in groups for matrix in weights.matrices(*(f"{name}.weight" for name in names))),
            qkv_bias=weights.vector(*(f"{name}.bias" for name in projections)) if of.bias else None,
            query_norm=packed.get("q_norm"),
            key_norm=packed.get("k_norm"),
            value_norm=packed.get("v_norm"),
            sinks=weights.vector("sinks") if of.sinks else None,
            distances=DistanceTable.read(of.distances, weights),
            out=weights.matrix("o_proj.weight"),
            out_bias=weights.vector("o_proj.bias") if of.output_bias else None,
            gate=weights.matrix("gate_proj.weight") if of.gated else None,
            gate_bias=weights.vector("gate_proj.bias") if of.gated and of.bias else None,
        )

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """All its matrices."""
        return (*self.qkv, self.out, *([self.gate] if self.gate else ()))

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


class StateVectors(NamedTuple):
    """The small weights of a state, in float32. conv: [conv, width]. rates: -exp(A_log). None = it has none."""

    conv: Tensor
    conv_bias: Tensor | None
    rates: Tensor | None
    rate_bias: Tensor | None
    norm: PackedNorm | None
    skip: Tensor | None = None  # D

    @classmethod
    def read(cls, of: State, weights: WeightReader) -> StateVectors:
        """Read the vectors."""
        return cls(
            conv=weights.vector("conv1d.weight").view(of.width, of.conv).T.contiguous(),
            conv_bias=weights.vector("conv1d.bias") if of.conv_bias else None,
            rates=-exponential(weights.vector("A_log")).float() if of.heads else None,
            rate_bias=weights.vector("dt_bias") if of.heads else None,
            norm=PackedNorm.read(of.norm, weights, "norm", of.normed_size) if of.norm else None,
            skip=weights.vector("D") if of.heads and of.steps else None,
        )


def recurring(
    of: State, layer: int, vectors: StateVectors, source: Tensor, columns: Tensor | None, out: Tensor
) -> Iterator[Op]:
    """Yield the operations of a layer's state from the rows of all its projections; out = the input of `out_proj`.

    columns: scratch memory for convolved rows; None = there is no recurrence.
    """
    sizes: dict[str, float] = {
        "layer": layer, "heads": of.heads, "kv_heads": of.key_heads, "dim": of.head_dim, "window": of.conv,
        "n": of.width, "k": of.key_dim, "stride": source.stride(0),
    }  # fmt: skip
    convolving = partial(
        make_op, Code.CONVOLVE, Type.F32, scale=vectors.conv, bias=vectors.conv_bias,
        source=source[:, of.first_column :], **sizes,
    )  # fmt: skip
    if columns is None:
        yield convolving(out=out, flags=Flag.GATED)
        return
    yield convolving(out=columns, activation=Activation.SILU)
    norm, own = vectors.norm, dict[str, Tensor | float | None]()
    if of.steps:
        least, most = of.steps
        own = {"flags": Flag.SCAN, "bias": vectors.skip, "factor": least, "softcap": most if most < math.inf else None}
    yield make_op(
        Code.RECUR, Type.F32, key_scale=vectors.rates, key_bias=vectors.rate_bias, source=columns, out=out,
        gates=source if of.steps else source[:, of.width :], scale=norm.scale if norm else None,
        eps=norm.of.eps if norm else None, **sizes, **own,
    )  # fmt: skip


@dataclass(frozen=True)
class PackedState:
    """The weights of a layer's state. None = the state has no such weight.

    inner: the matrices of all projections in their order, neighbours of the same type as one. Those of the rates of
    states are never rounded.
    """

    of: State
    inner: tuple[Weight, ...]
    inner_bias: Tensor | None
    vectors: StateVectors
    out: Weight
    out_bias: Tensor | None

    @classmethod
    def read(cls, of: State, weights: WeightReader) -> PackedState:
        """Read and pack the weights."""
        names = [f"{name}.weight" for name in of.projections]
        rounded, exact = names[:2], names[2:]
        return cls(
            of=of,
            inner=(*weights.matrices(*rounded), *weights.unrounded().matrices(*exact)),
            inner_bias=weights.vector(*(f"{name}.bias" for name in of.projections)) if of.bias else None,
            vectors=StateVectors.read(of, weights),
            out=weights.matrix("out_proj.weight"),
            out_bias=weights.vector("out_proj.bias") if of.bias else None,
        )

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """All its matrices."""
        return (*self.inner, self.out)


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer that `of` describes. None = it does not have this one.

    norms: by the names of their modules, see `layer_norms`. mixing: attention, or the state in its place. scale: the
    factor of the residual stream at the end.
    """

    of: Layer
    norms: Mapping[str, PackedNorm]
    mixing: PackedAttention | PackedState
    cross: PackedAttention | None
    mlp: PackedMlp | PackedExperts
    inputs: PackedInputs | None = None
    scale: float = 1.0

    @classmethod
    def read(cls, of: Layer, layer: WeightReader, *, queries_apart: bool = False) -> PackedLayer:
        """Read and pack a layer's weights."""
        mlp, cross = layer.inside("mlp."), layer.inside(CROSS)
        return cls(
            of=of,
            norms={name: PackedNorm.read(norm, layer, name) for name, norm in layer_norms(of).items()},
            mixing=_read_mixing(of, layer, queries_apart),
            cross=PackedAttention.read(of.cross, cross, queries_apart=True) if of.cross else None,
            mlp=PackedExperts.read(of.mlp, mlp) if isinstance(of.mlp, Experts) else PackedMlp.read(of.mlp, mlp),
            inputs=PackedInputs.read(of.token_inputs, layer.inside(TOKEN_INPUTS)),
            scale=_read_scale(layer) if of.scaled else 1.0,
        )

    @classmethod
    def read_all(cls, layers: Sequence[Layer], weights: WeightReader, name: str) -> list[PackedLayer]:
        """Read and pack layers, whose tensors' names begin with `name`, with tables of distances that they share."""
        found = list[PackedLayer]()
        for index, of in enumerate(layers):
            layer = cls.read(of, weights.inside(name.format(index)))
            distances = of.attention and of.attention.distances
            if distances and distances.shares is not None:
                shared = found[distances.shares].attention.distances
                layer = replace(layer, mixing=replace(layer.attention, distances=shared))
            found.append(layer)
        return found

    @property
    def attention(self) -> PackedAttention:
        """The attention of a layer that has it."""
        assert isinstance(self.mixing, PackedAttention)
        return self.mixing

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of one row reads."""
        read = (*self.mixing.matrices, *(self.cross.read_matrices if self.cross else ()))
        return _bytes_of(*read, *self._input_matrices) + self.mlp.bytes_per_pass

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices, the table of the inputs included."""
        tables = [self.inputs.table] if self.inputs else []
        own = (*self.mixing.matrices, *(self.cross.matrices if self.cross else ()))
        return _bytes_of(*own, *self._input_matrices, *tables) + self.mlp.num_bytes

    @property
    def _input_matrices(self) -> tuple[Weight, ...]:
        return self.inputs.matrices if self.inputs else ()


def _read_mixing(of: Layer, layer: WeightReader, queries_apart: bool) -> PackedAttention | PackedState:
    if of.attention:
        return PackedAttention.read(of.attention, layer.inside(SELF), queries_apart=queries_apart)
    assert of.state
    return PackedState.read(of.state, layer.inside(STATE))


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
        return cls(positions, PackedNorm.read(of.norm, weights, beginning + EMBEDDING_NORM) if of.norm else None)


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
        # A pass looks up one row for each token, so rounding blocks again would save no time.
        keeps = not config.head.tied and weights.types.of(TABLE) in BLOCK_SIZES
        ends = weights.deciding()
        table = (weights.unrounded() if keeps else ends).decoding_ordered(TABLE).matrix(TABLE)
        head = table if config.head.tied else ends.matrix(HEAD)
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
        return widths | ({"gates": max(widths["gated"], widths.get("gates", 0))} if apart else {})

    @property
    def bytes_per_pass(self) -> int:
        """How many bytes of weights a pass of one row reads, padding included: a lower bound of any pass's time."""
        return sum(layer.bytes_per_pass for layer in self.layers) + self.head.memory.numel()

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices, padding included; a head that is the table counts once."""
        ends = [self.table] if self.head is self.table else [self.table, self.head]
        return sum(layer.num_bytes for layer in self.every_layer) + _bytes_of(*ends)
