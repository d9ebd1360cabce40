"""The description of a decoder: data that its family reads from config.json, and that all interpreters share.

    x = norm(scale * embedding[token] (+ positions[p]))
    each layer    x = norm(x + scale * norm(attention(norm(x))))       or a `State` in place of attention
                  x = norm(x + scale * attention(norm(x), source))
                  x = norm(x + scale * norm(mlp(norm(x))))
                  x = number * (x + norm(a vector of the token and the layer))
    logits        softcap(scale * (head(norm(x)) + bias))

Each part is optional where its field has a default. Interpreters are the reference (models/reference.py, which
training and heads use too), the native program (models/native/program.py) and the cost model (models/sizes.py). None
of them depends on a family's name. Arithmetic that no part describes is a new field of a part, or a new kind of part,
in all three.

A `TensorMap` says where a checkpoint's files hold the tensors, and how each is made from what is stored: an
`Expression` is the name of a stored tensor, or an operation on an expression, as in Rows(Transposed("c_attn"), ...).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from typing_extensions import override

from speculant.errors import ModelError

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)  # of a layer or an expert
_KINDS = ("weight", "bias")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """Makes a model's tensor from what an expression reads."""

    of: Expression

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape of `of`, from the shape of the result."""
        return shape


class RowOperation(Operation, ABC):
    """Takes rows."""

    @abstractmethod
    def rows(self, count: int) -> Sequence[int]:
        """Return the index of the stored row for each of the model tensor's `count` rows."""


@dataclass(frozen=True)
class Unpaired(RowOperation):
    """A stored tensor of `heads` heads, in which two rows that rotate together are neighbours.

    In the model, the first row of each pair is in the first half of its head, and the second row in the other half.
    """

    heads: int

    @override
    def rows(self, count: int) -> list[int]:
        found: list[int] = np.arange(count).reshape(self.heads, -1, 2).swapaxes(1, 2).ravel().tolist()
        return found


@dataclass(frozen=True)
class Rows(RowOperation):
    """Rows of a stored tensor that holds several tensors: of each `period` rows, `size` from `first` on."""

    first: int
    size: int
    period: int

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0] // self.size * self.period, *shape[1:])

    @override
    def rows(self, count: int) -> list[int]:
        periods = np.arange(count // self.size)[:, None] * self.period
        found: list[int] = (periods + self.first + np.arange(self.size)).ravel().tolist()
        return found


@dataclass(frozen=True)
class Picked(RowOperation):
    """Rows of a stored tensor of `total` rows, by their indices; some may be there several times."""

    chosen: Sequence[int]
    total: int

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return (self.total, *shape[1:])

    @override
    def rows(self, count: int) -> Sequence[int]:
        return self.chosen


@dataclass(frozen=True)
class Untiled(RowOperation):
    """A stored tensor that has the first head of each of `groups` groups, then the second one of each, and so on.

    In the model, the heads of a group are neighbours. first: the rows before all heads, which stay.
    """

    heads: int
    groups: int
    first: int = 0

    @override
    def rows(self, count: int) -> list[int]:
        places = np.arange(self.first, count).reshape(self.heads // self.groups, self.groups, -1)
        return [*range(self.first), *places.swapaxes(0, 1).ravel().tolist()]


@dataclass(frozen=True)
class UntiledColumns(Operation):
    """A stored matrix whose columns are those of heads, in the order of `Untiled`."""

    heads: int
    groups: int

    def columns(self, width: int) -> list[int]:
        """Return the index of the stored column for each of the model matrix's columns."""
        return Untiled(self.of, self.heads, self.groups).rows(width)

    def order(self, width: int) -> list[int]:
        """Return the index of the model matrix's column for each of the stored columns."""
        return Untiled(self.of, self.heads, self.heads // self.groups).rows(width)


@dataclass(frozen=True)
class Unsqueezed(Operation):
    """A stored matrix that has a dimension of 1 in its middle in the model. A vector stays as it is."""

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0], shape[2]) if len(shape) == 3 else shape


@dataclass(frozen=True)
class Flattened(Operation):
    """The numbers of a stored matrix of `width` columns, as one vector."""

    width: int

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return (shape[0] // self.width, self.width)


@dataclass(frozen=True)
class LogOfNegative(Operation):
    """log(-x) of a stored tensor x, whose numbers are below 0."""


@dataclass(frozen=True)
class Transposed(Operation):
    """A stored matrix whose columns are the model's rows. A vector stays as it is."""

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclass(frozen=True)
class Plus(Operation):
    """A stored tensor to which a number is added."""

    number: float


@dataclass(frozen=True)
class Columns(Operation):
    """Columns of a stored matrix of `width` columns: `size` of them, from `first` on."""

    first: int
    size: int
    width: int

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.width)


@dataclass(frozen=True)
class Stacked(Operation):
    """One of the `count` tensors that a stored tensor consists of, one for each index of its first dimension.

    index: which one it is. A `TensorMap` sets it to the last number in the name of the model's tensor, if it has one.
    """

    count: int
    index: int = 0

    @override
    def stored_shape(self, shape: Shape) -> Shape:
        return (self.count, *shape)


Expression = str | Operation  # how a model's tensor is made; the name of a stored tensor, which is taken as it is


def stored_name(made: Expression) -> str:
    """Return the name of the stored tensor that an expression reads."""
    return made if isinstance(made, str) else stored_name(made.of)


def with_name(made: Expression, rename: Callable[[str], str]) -> Expression:
    """Return an expression that reads a tensor of another name."""
    return rename(made) if isinstance(made, str) else replace(made, of=with_name(made.of, rename))


def stored_shape(made: Expression, shape: Shape) -> Shape:
    """Return the shape of the stored tensor that an expression reads, from the shape of its result."""
    return shape if isinstance(made, str) else stored_shape(made.of, made.stored_shape(shape))


def _numbered(made: Expression, numbers: Sequence[str]) -> Expression:
    """Return an expression whose stacks have the last of these numbers as their index."""
    if isinstance(made, str):
        return made
    inner = replace(made, of=_numbered(made.of, numbers))
    return replace(inner, index=int(numbers[-1])) if isinstance(inner, Stacked) and numbers else inner


def _upright(made: Expression) -> Expression:
    """Return an expression without transpositions."""
    if isinstance(made, str):
        return made
    return _upright(made.of) if isinstance(made, Transposed) else replace(made, of=_upright(made.of))


def _stacks(made: Expression) -> bool:
    """Whether an expression reads one of several stacked tensors."""
    return not isinstance(made, str) and (isinstance(made, Stacked) or _stacks(made.of))


@dataclass(frozen=True)
class TensorMap:
    """Where the files hold a model's tensors.

    names: pairs of a tensor of the model (see `models/sizes.py`) and the expression for it, for those that are not
    stored under the model's own names; {} stands for a number, such as that of a layer. An entry for one layer takes
    precedence over one for all. unused: tensors that the files may have and the model lacks. copies: pairs of a stored
    tensor and of one with the same numbers, which files may have too, or instead. upright_names: stored matrices that
    are not transposed, whatever expressions say.
    """

    names: tuple[tuple[str, Expression], ...] = ()
    unused: frozenset[str] = frozenset()
    copies: tuple[tuple[str, str], ...] = ()
    upright_names: tuple[str, ...] = ()

    @cached_property
    def _made(self) -> dict[str, Expression]:
        return dict(self.names)

    def expression(self, name: str) -> Expression:
        """Return how a tensor is made."""
        numbers = _NUMBER.findall(name)
        made = self._made.get(name) or self._made.get(_NUMBER.sub("{}", name), name)
        made = _numbered(with_name(made, lambda stored: stored.format(*numbers)), numbers)
        return _upright(made) if stored_name(made) in self.upright_names else made

    def upright(self, stored: Collection[str]) -> TensorMap:
        """Return the map for files in which these stored matrices are not transposed."""
        are_transposed = any(_upright(made) != made for _, made in self.names)
        return replace(self, upright_names=tuple(sorted(stored)) if are_transposed else ())

    def unstacked(self, stored: Iterable[str]) -> TensorMap:
        """Return the map for files in which tensors of a stack may be apart, under the model's names."""
        apart = {_NUMBER.sub("{}", name) for name in stored}
        return replace(self, names=tuple(each for each in self.names if each[0] not in apart or not _stacks(each[1])))

    def stored(self, name: str) -> str:
        """Return the files' name of a tensor."""
        return stored_name(self.expression(name))


SAME_NAMES = TensorMap()


def map_modules(
    own: str, stored: str, layer: Mapping[str, Expression], outside: Mapping[str, Expression] = MappingProxyType({})
) -> TensorMap:
    """Return the map for modules, each with a weight and perhaps a bias, that are stored under other names.

    own, stored: the beginning of the names of a layer's tensors, in the model and in the files, such as
    "model.layers.{}.". layer: expressions for the modules of a layer; outside: for modules outside of layers.
    """
    pairs = [(own + name, with_name(made, lambda part: stored + part)) for name, made in layer.items()]
    pairs += outside.items()
    return TensorMap(tuple(
        (f"{name}.{kind}", with_name(made, lambda module, kind=kind: f"{module}.{kind}"))  # type: ignore[misc]
        for name, made in pairs for kind in _KINDS
    ))  # fmt: skip


MOST_WEIGHTS = 2**40  # in one matrix; no machine holds more
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
NORMS = ("rms", "layer")


@dataclass(frozen=True)
class Rope:
    """Rotary positions of base `theta`.

    kind: default, factors or dynamic. factors: the divisor of each pair's frequency; inf = the pair is not rotated.
    long_factors: those for all positions of a text of more than `original_max_positions` tokens; () = the same. factor:
    that of dynamic scaling, which begins beyond `original_max_positions`. dims: how many dimensions of each head are
    rotated, from the first one on; None = all. Dimension i is paired with i + dims / 2. scale: the factor of cosines
    and sines. query_beta: queries at position p are multiplied by
    1 + query_beta * log(1 + floor(p / original_max_positions)).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0  # 0 = not needed
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    dims: int | None = None
    scale: float = 1.0
    query_beta: float = 0.0


def restart_of(ropes: Iterable[Rope]) -> int | None:
    """Return the number of tokens beyond which a text uses the long factors; None = there are none.

    Raises ModelError if it differs between the layers' rotary positions.
    """
    found = {rope.original_max_positions for rope in ropes if rope.long_factors}
    if len(found) > 1:
        raise ModelError(
            f"config.json has rotary factors for texts beyond {' and beyond '.join(map(str, sorted(found)))} tokens,"
            " which is not implemented",
            "use a checkpoint with one original_max_position_embeddings.",
        )
    return next(iter(found), None)


@dataclass(frozen=True)
class Norm:
    """Normalisation of the last dimension, then multiplication by a scale per number.

    kind: "rms" divides by the root mean square; "layer" subtracts the mean first. bias: one is added at the end.
    offset: a number that is added to the stored scales. scaled: whether there are scales; all are 1 otherwise.
    """

    eps: float
    kind: str = "rms"
    bias: bool = False
    offset: float = 0.0
    scaled: bool = True


@dataclass(frozen=True)
class DistanceBias:
    """A learned number for each head and distance from a row to a key, added to scores (T5, arXiv 1910.10683, 2.1).

    Distances are in `buckets`: half of them hold one distance each, from 0 on, the others are wider the farther away.
    The last one holds all distances from about `max_distance` on. both_ways: keys after the row have the second half of
    the buckets; otherwise a row sees none. shares: the layer whose table it uses; None = it has its own.
    """

    buckets: int
    max_distance: int
    both_ways: bool = False
    shares: int | None = None

    def __post_init__(self) -> None:
        single = self.buckets // (4 if self.both_ways else 2)
        if not 0 < single < self.max_distance:
            raise ModelError(
                f"config.json has {self.buckets} buckets of distances up to {self.max_distance}, of which {single} hold"
                " one distance each",
                "check relative_attention_num_buckets and relative_attention_max_distance in config.json.",
            )


@dataclass(frozen=True)
class Attention:
    """Self-attention, causal unless `ahead`, or attention over a source. `heads` share `kv_heads` keys and values.

    rope: None = no rotation. window: the positions that a row sees, its own included; None = all. qk_norm: the norm of
    queries and keys before the rotation, of each head alone or, with `norm_all_heads`, of all heads together. bias:
    queries, keys and values have one. scale: the factor of scores; None = head_dim ** -0.5. softcap: c limits scores s
    to c * tanh(s / c). sinks: a learned score per head takes part in the softmax and has no value. value_norm: the norm
    of each head's values. shares: the earlier layer whose keys and values it reads; None = it has its own. ahead: a row
    also sees the later rows of its sequence in a pass. fixed_window: the windows of these rows all begin where that of
    the first one begins. A pass of a model with one of the two has chains alone, and no draft trees. distances: numbers
    that are added to scores. source: keys and values are those of the sequence's encoded source, all of which every row
    sees. gated: the result is multiplied by the sigmoid of a projection of the input.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    qk_norm: Norm | None = None
    bias: bool = False
    output_bias: bool = False
    norm_all_heads: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    value_norm: Norm | None = None
    shares: int | None = None
    ahead: bool = False
    fixed_window: bool = False
    distances: DistanceBias | None = None
    source: bool = False
    gated: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json has {self.heads} attention heads, not a multiple of {self.kv_heads} key heads",
                "check num_attention_heads and num_key_value_heads in config.json.",
            )
        if self.rope:
            self._check_rope(self.rope)

    def _check_rope(self, rope: Rope) -> None:
        rotated = self.rotated
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ModelError(
                f"config.json rotates {rotated} dimensions of heads of {self.head_dim} dimensions, which can't be"
                " rotated in pairs",
                "check head_dim, hidden_size, num_attention_heads and the rotary settings in config.json.",
            )
        for factors in (rope.factors, rope.long_factors):
            if factors and 2 * len(factors) != rotated:
                raise ModelError(
                    f"there are {len(factors)} factors of rotary positions, not one for each pair of the"
                    f" {rotated} rotated dimensions of a head",
                    "use the factors that belong to this model.",
                )
        if rope.kind == "dynamic" and rotated == 2:
            raise ModelError(
                "config.json asks for dynamic rope scaling of 2 dimensions of each head, for which it is not defined",
                "check rope_scaling and head_dim in config.json.",
            )

    @property
    def rotated(self) -> int:
        """How many dimensions of each head are rotated."""
        if self.rope is None:
            return 0
        return self.head_dim if self.rope.dims is None else self.rope.dims

    @property
    def score_scale(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def normed_sizes(self) -> tuple[int, int]:
        """The widths that the norms of queries and of keys have."""
        return (self.query_size, self.key_size) if self.norm_all_heads else (self.head_dim, self.head_dim)

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def own_kv_heads(self) -> int:
        """The key heads that it computes: none if it reads another layer's."""
        return 0 if self.shares is not None else self.kv_heads

    @property
    def query_size(self) -> int:
        """The width of all queries, and of the attention's result."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """The width of all keys that it computes, and of all values."""
        return self.own_kv_heads * self.head_dim

    @property
    def fused_size(self) -> int:
        """The width of all queries, keys and values that it computes."""
        return self.query_size + 2 * self.key_size


@dataclass(frozen=True)
class State:
    """What a layer may have in place of attention: a convolution over the last positions, and perhaps a recurrence.

    Without heads it is a short convolution (LFM2, arXiv 2511.23404), of `width` channels:

        b, c, x = in_proj(input);  out_proj(c * conv(b * x))

    With heads it has a recurrence. Each of `key_heads` keys serves heads / key_heads consecutive heads. A head has a
    state S [key_dim, head_dim], in float32 or wider. It is a gated delta rule (arXiv 2412.06464):

        q, k, v, z, b, a = the projections of the input;  q, k, v = silu(conv(q, k, v))
        q, k = q / |q| / sqrt(key_dim), k / |k|;  g = -exp(A_log) softplus(a + dt_bias)
        S = exp(g) S;  d = sigmoid(b) (v - S^T k);  S = S + k d^T;  out_proj(norm(S^T q) * silu(z))

    With heads and `steps` it is Mamba 2 (arXiv 2405.21060), whose projections are one matrix:

        z, v, k, q, a = in_proj(input);  v, k, q = silu(conv(v, k, q));  t = softplus(a + dt_bias), within `steps`
        S = exp(-exp(A_log) t) S;  S = S + k (t v)^T;  out_proj(norm((S^T q + D v) * silu(z)))

    conv: how many positions the convolution of each channel sees, its own included. norm: that of each head's result;
    of Mamba 2, that of the results of all heads that a key serves. steps: the limits of t. bias: the projections have
    one. conv_bias: the convolution has one.
    """

    width: int
    conv: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    head_dim: int = 0
    norm: Norm | None = None
    bias: bool = False
    conv_bias: bool = False
    steps: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.heads and (self.heads % self.key_heads or self.width != 2 * self.key_size + self.size):
            raise ModelError(
                f"config.json describes a state of {self.heads} heads for {self.key_heads} keys, not a multiple",
                "check linear_num_value_heads and linear_num_key_heads, or mamba_n_heads and mamba_n_groups, in"
                " config.json.",
            )

    @property
    def key_size(self) -> int:
        """The width of all queries, and of all keys, of one row."""
        return self.key_heads * self.key_dim

    @property
    def size(self) -> int:
        """The width of the result before `out_proj`."""
        return self.heads * self.head_dim if self.heads else self.width

    @property
    def normed_size(self) -> int:
        """How many scales the norm has."""
        return self.head_dim if self.steps is None else self.size

    @property
    def first_column(self) -> int:
        """The first column of the projections that the convolution reads."""
        return 0 if self.steps is None else self.size

    @property
    def projections(self) -> dict[str, int]:
        """The widths of the projections of the input, by the names of their modules."""
        if not self.heads:
            return {"in_proj": 3 * self.width}
        if self.steps is not None:
            return {"in_proj": self.size + self.width + self.heads}
        return {"in_proj_qkv": self.width, "in_proj_z": self.size, "in_proj_b": self.heads, "in_proj_a": self.heads}

    @property
    def update_size(self) -> int:
        """The numbers that change the state by one row: a key per key head, and a vector d and a decay per head."""
        return self.key_size + self.heads * (self.head_dim + 1)


@dataclass(frozen=True)
class Mlp:
    """The feed-forward block; `size` is the width between its projections.

    gated: down(activation(gate(x)) * up(x)), else down(activation(up(x))).
    """

    size: int
    bias: bool = False
    gated: bool = True
    activation: str = "silu"


@dataclass(frozen=True)
class TokenInputs:
    """A vector of `size` numbers for each token, which differs from layer to layer.

        input = factor * (norm(projection_factor * projection(e)) + table_factor * table[token])
        x     = x + norm(out(activation(gate(x)) * input))

    e: the row's input embedding, without learned positions. rows: of the table. A row with an input embedding of its
    own uses the vector of token 0.
    """

    size: int
    rows: int
    norm: Norm
    activation: str = "silu"
    table_factor: float = 1.0
    projection_factor: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True)
class Clamped:
    """The gated activation (up + 1) * gate * sigmoid(gain * gate); before it, gate and |up| are limited to `limit`."""

    gain: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """`count` feed-forward blocks, of which each row uses `used`. A router selects them and weights their results.

    The router is a matrix whose results are the experts' scores. A row uses the experts with the largest scores; of
    equal scores, the lowest indices win. Weights are a softmax of the scores, in float32, over all experts or, with
    `renormalise`, over the used ones. size: the width of one expert. bias: all matrices have one, the router's
    included. clamped: the gated activation that replaces activation(gate) * up; None = it is not replaced.

    sigmoid: weights are sigmoids of the scores in place of a softmax; with `renormalise` they are divided by their
    sum + 1e-6. favours: with `sigmoid`, a stored number for each expert is added to its weight, to select experts and
    for nothing else. factor: of all weights. shared: a block that each row uses besides, whose result is added.
    shared_gate: that result is multiplied by the sigmoid of a number, which is a projection of the input.
    """

    count: int
    used: int
    size: int
    renormalise: bool = True
    activation: str = "silu"
    bias: bool = False
    clamped: Clamped | None = None
    sigmoid: bool = False
    favours: bool = False
    factor: float = 1.0
    shared: Mlp | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.used > self.count:
            raise ModelError(
                f"config.json lets each token use {self.used} experts, and the model has {self.count}",
                "check num_experts and num_experts_per_tok in config.json.",
            )


@dataclass(frozen=True)
class Layer:
    """Attention, perhaps attention over the source, then the feed-forward block, each added to the residual stream.

    state: what takes the place of attention, with the same norms and factors. before_*: the norm of a block's input;
    None = the block reads the residual stream itself. after_*: the norm of its result. parallel: both blocks read the
    same residual stream, and the same norm of it if before_mlp is None. residual_scale: the factor of all results.
    token_inputs: the inputs by token that are added after both. scaled: a stored number multiplies the residual
    stream at the end. cross: attention over the source; before_cross: the norm of its input. end_*: the norm of the
    residual stream after a block was added to it, as in arXiv 1706.03762. In the last layer this norm is left out,
    because it is the norm before the head, or that of the encoder's result.
    """

    attention: Attention | None
    mlp: Mlp | Experts
    before_attention: Norm | None
    before_mlp: Norm | None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    token_inputs: TokenInputs | None = None
    scaled: bool = False
    cross: Attention | None = None
    before_cross: Norm | None = None
    end_attention: Norm | None = None
    end_cross: Norm | None = None
    end_mlp: Norm | None = None
    state: State | None = None

    @property
    def window(self) -> int | None:
        """The positions that a row of its attention sees; None = all, or there is no attention."""
        return self.attention.window if self.attention else None

    def attending(self, **fields: Any) -> Layer:
        """Return a layer whose attention has other fields."""
        assert self.attention, "the layer has a state in place of attention"
        return replace(self, attention=replace(self.attention, **fields))


@dataclass(frozen=True)
class Embedding:
    """A table of vectors by token, multiplied by `scale`. positions: the rows of a table of positions.

    sinusoids: these are not learned: position p has the sines of p / 10000^(2i / hidden_size) for all i, then the
    cosines. norm: that of the sum. mask: the token that stands for an unknown one, if the model was trained to predict
    several tokens in one pass.
    """

    vocab_size: int
    hidden_size: int
    scale: float = 1.0
    positions: int | None = None
    mask: int | None = None
    sinusoids: bool = False
    norm: Norm | None = None


@dataclass(frozen=True)
class Head:
    """The output matrix. tied: it is the embedding table.

    by_files: a tied head has a matrix of its own if the files hold one that differs from the table. tokens: the ids of
    its rows, ascending; () = all. Other tokens have the logit -inf. bias: one is added to logits, if the files hold it.
    scale: the factor of logits. softcap: c limits logits l, after `scale`, to c * tanh(l / c).
    """

    tied: bool = False
    tokens: tuple[int, ...] = ()
    scale: float = 1.0
    softcap: float | None = None
    by_files: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Encoder:
    """The layers that read a source, all of whose rows see one another, and the norm of their result.

    It reads the decoder's table of tokens. If the decoder has learned positions or a norm of embeddings, the encoder
    has its own, of the same sizes. Each layer of the decoder computes keys and values from the result, see
    `Layer.cross`.
    """

    layers: tuple[Layer, ...]
    norm: Norm


@dataclass(frozen=True)
class DecoderConfig:
    """All that determines a decoder's arithmetic, and the names of its tensors in the files.

    norm: the one before the head. encoder: of an encoder-decoder model.
    """

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Head
    max_positions: int
    tensors: TensorMap = SAME_NAMES
    encoder: Encoder | None = None

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)
        for layers in (self.layers, self.encoder.layers if self.encoder else ()):
            _check_distances(layers)
        self._check_encoder()
        self._check_sizes()
        restart_of(self.ropes)  # checks them

    def _check_layer(self, index: int, layer: Layer) -> None:
        """Check a layer against the layer whose keys it shares, and against the vocabulary."""
        own, inputs = layer.attention, layer.token_inputs
        if bool(own) == bool(layer.state):
            raise ValueError(f"layer {index} has attention and a state, or neither")
        if own and own.shares is not None:
            of = self.layers[own.shares].attention if own.shares < index else None
            facts = of and (of.shares, of.kv_heads, of.head_dim, of.window)
            if facts != (None, own.kv_heads, own.head_dim, own.window):
                raise ModelError(
                    f"config.json describes layer {index} with the keys of layer {own.shares}, which has other ones",
                    "check layer_types, the windows and the numbers of heads in config.json.",
                )
        if inputs and inputs.rows < self.vocab_size:
            raise ModelError(
                f"config.json has a table of {inputs.rows} tokens for each layer, and the model has {self.vocab_size}",
                "use a checkpoint whose table has all tokens.",
            )

    def _check_encoder(self) -> None:
        """Check that a source can be a sequence of the cache: all layers have keys of one shape for each position."""
        encoder = self.encoder.layers if self.encoder else ()
        if any(bool(layer.cross) != bool(encoder) for layer in self.layers) or any(layer.cross for layer in encoder):
            raise ModelError(
                "config.json describes an encoder whose result not all layers of the decoder read, or none",
                "use a checkpoint of one of the supported families.",
            )
        if not encoder:
            return
        first = self.attention
        stored = [layer.attention or first for layer in (*self.layers, *encoder)]
        read = [(layer.attention or first, layer.cross) for layer in self.layers if layer.cross]
        read += [(first, layer.attention or first) for layer in encoder]
        if any(of.window or of.shares is not None for of in stored) or any(
            (own.kv_heads, own.head_dim) != (other.kv_heads, other.head_dim) for own, other in read
        ):
            raise ModelError(
                "config.json describes an encoder and a decoder with windows, or with heads of different sizes",
                "use a checkpoint whose attention has one size and no windows.",
            )

    def _check_sizes(self) -> None:
        """Refuse matrices whose sizes could overflow, before their files are opened."""
        widths = [sum(layer.state.projections.values()) for layer in self.layers if layer.state]
        widths += [of.mlp.shared.size for of in self.layers if isinstance(of.mlp, Experts) and of.mlp.shared]
        inner = max(
            *(layer.mlp.size for layer in self.every_layer), *(of.fused_size for of in self.attentions), *widths
        )
        tables = sum(layer.token_inputs.size for layer in self.layers if layer.token_inputs)
        largest = max(inner, self.vocab_size)
        if tables * self.vocab_size > MOST_WEIGHTS:
            raise ModelError(
                f"config.json describes a table of {tables * self.vocab_size} weights, more than {MOST_WEIGHTS}",
                "check the size of the inputs of layers in config.json.",
            )
        if largest * self.hidden_size > MOST_WEIGHTS:
            raise ModelError(
                f"config.json describes a matrix of {largest * self.hidden_size} weights, more than {MOST_WEIGHTS}",
                "check vocab_size, hidden_size, intermediate_size, head_dim and the numbers of heads in config.json.",
            )

    @property
    def vocab_size(self) -> int:
        """The number of tokens, padding rows included."""
        return self.embedding.vocab_size

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.embedding.hidden_size

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def every_layer(self) -> tuple[Layer, ...]:
        """The decoder's layers, then the encoder's."""
        return (*self.layers, *(self.encoder.layers if self.encoder else ()))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The distinct kinds of attention of these layers, in order of first use."""
        return tuple(dict.fromkeys(of for layer in self.every_layer for of in (layer.attention, layer.cross) if of))

    @property
    def attention(self) -> Attention:
        """That of the first layer that has any; others may differ."""
        return self.attentions[0]

    @property
    def states(self) -> tuple[State | None, ...]:
        """The state of each layer; () if no layer has one."""
        states = tuple(layer.state for layer in self.layers)
        return states if any(states) else ()

    @property
    def state(self) -> State | None:
        """The state of the first layer that has one."""
        return next(filter(None, self.states), None)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary positions of the layers, in order of first use."""
        return tuple(dict.fromkeys(of.rope for of in self.attentions if of.rope))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; () if every layer sees all positions."""
        windows = tuple(layer.window for layer in self.layers)
        return windows if any(windows) else ()

    @property
    def restart_at(self) -> int | None:
        """See `ModelNeeds.restart_at`."""
        return restart_of(self.ropes)

    def truncated(self, num_layers: int) -> DecoderConfig:
        """Return the decoder of the first layers, with the same encoder, norm and head."""
        return replace(self, layers=self.layers[:num_layers])

    def with_head(self, tokens: tuple[int, ...]) -> DecoderConfig:
        """Return the decoder whose head has only the rows of these tokens, () = all, and is not the embedding table."""
        return replace(self, head=replace(self.head, tied=False, by_files=False, tokens=tokens))


def _check_distances(layers: Sequence[Layer]) -> None:
    """Check that each table of distances that a layer shares is that of an earlier layer, and fits."""
    for index, layer in enumerate(layers):
        own = layer.attention
        of = own and own.distances
        if own is None or of is None or of.shares is None:
            continue
        owner = layers[of.shares].attention if of.shares < index else None
        if owner is None or (owner.heads, owner.distances) != (own.heads, replace(of, shares=None)):
            raise ModelError(
                f"config.json describes layer {index} with the distances of layer {of.shares}, which has other ones",
                "use a checkpoint of one of the supported families.",
            )
