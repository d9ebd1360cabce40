"""The description of a decoder: data that its family reads from config.json, and that all interpreters share.

    x = embedding[token]
    each layer    x = x + attention(norm(x))
                  x = x + mlp(norm(x))
    logits        head(norm(x))

Interpreters are the reference (models/reference/decoder.py, which training and heads use too), the native program
(models/native/program.py) and the cost model (models/sizes.py). None of them depends on a family's name. Arithmetic
that no part describes is a new field of a part, or a new kind of part, in all three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from speculant.errors import ModelError

MOST_WEIGHTS = 2**40  # in one matrix; no machine holds more


@dataclass(frozen=True)
class Rope:
    """Rotary positions of base `theta`, scaled by `kind` with the checkpoint's factors."""

    theta: float
    kind: str = "default"  # default, linear, dynamic, llama3, factors
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    factors: tuple[float, ...] = ()  # of kind "factors": the divisor of each pair's frequency


@dataclass(frozen=True)
class Norm:
    """Division of the last dimension by its root mean square, then multiplication by a scale per number."""

    eps: float


@dataclass(frozen=True)
class Attention:
    """Causal self-attention. `heads` share `kv_heads` keys and values.

    window: the positions that a row sees, its own included; None = all. qk_norm: of each query's and key's head,
    before the rotation. bias: of queries, keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    qk_norm: Norm | None = None
    bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json has {self.heads} attention heads, not a multiple of {self.kv_heads} key heads",
                "check num_attention_heads and num_key_value_heads in config.json.",
            )
        if self.head_dim % 2:
            raise ModelError(
                f"config.json gives heads of {self.head_dim} dimensions, which can't be rotated in pairs",
                "check head_dim, hidden_size and num_attention_heads in config.json.",
            )
        if self.rope.kind == "factors" and 2 * len(self.rope.factors) != self.head_dim:
            raise ModelError(
                f"there are {len(self.rope.factors)} factors of rotary positions, not one for each pair of the"
                f" {self.head_dim} dimensions of a head",
                "use the factors that belong to this model.",
            )
        if self.rope.kind == "dynamic" and self.head_dim == 2:
            raise ModelError(
                "config.json asks for dynamic rope scaling of heads of 2 dimensions, for which it is not defined",
                "check rope_scaling and head_dim in config.json.",
            )

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def query_size(self) -> int:
        """The width of all queries, and of the attention's result."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """The width of all keys, and of all values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate(x)) * up(x)), of `size` numbers in between."""

    size: int
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """Attention, then the feed-forward block. Each reads the residual stream after a norm; None = without one."""

    attention: Attention
    mlp: Mlp
    before_attention: Norm | None
    before_mlp: Norm


@dataclass(frozen=True)
class Embedding:
    """A table of one vector per token."""

    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class Head:
    """The output matrix. tied: it is the embedding table.

    tokens: the ascending ids of its rows; () = all. Other tokens have the logit -inf.
    """

    tied: bool = False
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unpaired:
    """A stored tensor of `heads` heads, in which two rows that rotate together are neighbours.

    In the model, the first row of each pair is in the first half of its head, and the second row in the other half.
    """

    name: str
    heads: int


# How a model's tensor is made: the name of a stored tensor, which is taken as it is, or an operation on one.
Expression = str | Unpaired


@dataclass(frozen=True)
class TensorMap:
    """Where the files hold a model's tensors.

    names: pairs of a tensor of the model (see `models/sizes.py`) and the expression for it, for those that are not
    stored under the model's own names; {} stands for the number of a layer.
    """

    names: tuple[tuple[str, Expression], ...] = ()

    def expression(self, name: str) -> Expression:
        """Return how a tensor is made."""
        for own, made in self.names:
            before, brackets, after = own.partition("{}")
            if not brackets and name == own:
                return made
            number = name.removeprefix(before).removesuffix(after)
            if brackets and number.isdigit() and name == f"{before}{number}{after}":
                return made.format(number) if isinstance(made, str) else replace(made, name=made.name.format(number))
        return name

    def stored(self, name: str) -> str:
        """Return the files' name of a tensor."""
        made = self.expression(name)
        return made if isinstance(made, str) else made.name


SAME_NAMES = TensorMap()


@dataclass(frozen=True)
class DecoderConfig:
    """All that determines a decoder's arithmetic, and the names of its tensors in the files.

    All layers have the same heads and rotary positions. norm: the one before the head.
    """

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Head
    max_positions: int
    tensors: TensorMap = SAME_NAMES

    def __post_init__(self) -> None:
        found = {layer.attention for layer in self.layers}
        if len({(each.heads, each.kv_heads, each.head_dim, each.rope) for each in found}) != 1:
            raise ModelError(
                "config.json describes layers with different heads or rotary positions, which is not implemented",
                "use a checkpoint of one of the supported families.",
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse matrices whose sizes could overflow, before their files are opened."""
        inner = max(layer.mlp.size for layer in self.layers)
        largest = max(self.attention.query_size + 2 * self.attention.key_size, inner, self.vocab_size)
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
    def attention(self) -> Attention:
        """The first layer's; all others have the same heads and rotary positions."""
        return self.layers[0].attention

    def truncated(self, num_layers: int) -> DecoderConfig:
        """Return the decoder of the first layers, with the same norm and head."""
        return replace(self, layers=self.layers[:num_layers])

    def with_head(self, tokens: tuple[int, ...]) -> DecoderConfig:
        """Return the decoder whose head has the rows of these tokens alone, and is not the embedding table."""
        return replace(self, head=Head(tokens=tokens))
