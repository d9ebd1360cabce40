"""Matrices of a small model at a larger shape, in which the residual stream is the small one repeated.

stream   | x | x | x |    its norms, of either kind, repeat as well with the same epsilon
readers  |W/2|W/2| 0 |    the quotient is a power of two, so that no bit is lost
writers  | W | W | W |    as rows

The small model's heads and rows come first. The others hold random weights, which are read and multiplied as usual, and
their results meet zeros. A layer with a state in place of attention grows with the hidden size. Where one norm is of
all heads together, further heads repeat the queries and keys of the small model's, so that the norm stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speculant.drafting import Part, Role
from speculant.errors import ConfigError, ModelError, suggest
from speculant.models import (
    DecoderConfig,
    Experts,
    Layer,
    Mlp,
    State,
    WeightSource,
    read_description,
    read_plain,
)

_OTHER_NAMES = {
    "hidden_size": ("n_embd", "word_embed_proj_dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "block_ff_dim"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
}  # that sizes have in the config.json of some families
# hidden size, intermediate size, layers, attention heads per key head
SHAPES = {"50m": (512, 2048, 8, 4), "1b": (2048, 8192, 16, 4), "3b": (3072, 8192, 28, 3)}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that may grow; the vocabulary and the heads' dimension stay.

    Raises ConfigError for sizes that no model has.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(f"the shape has {name} = {size}, not a positive number", f"choose another {name}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"the shape has {self.num_attention_heads} attention heads, not a multiple of"
                f" {self.num_key_value_heads} key heads",
                "choose a number of attention heads that the key heads divide.",
            )

    @property
    def group_size(self) -> int:
        """The attention heads that share a key head."""
        return self.num_attention_heads // self.num_key_value_heads


def named_shape(name: str, head_dim: int) -> Shape:
    """Return the shape of this name, whose heads of `head_dim` dimensions make up the hidden size.

    Raises ConfigError for an unknown name, and for heads that do not divide the shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is unknown", suggest(name, SHAPES))
    hidden, intermediate, layers, group = SHAPES[name]
    if head_dim < 1 or hidden % (head_dim * group):
        raise ConfigError(
            f"the hidden size {hidden} of the shape {name!r} is not a whole number of groups of {group} heads of"
            f" {head_dim} dimensions",
            "give a Shape of your own.",
        )
    return Shape(hidden, intermediate, layers, hidden // head_dim, hidden // head_dim // group)


def decoder_shape(decoder: DecoderConfig) -> Shape:
    """Return the sizes of a model. Raises ModelError if its layers differ in them or have experts, or for encoders."""
    if decoder.encoder is not None:
        raise ModelError("encoder-decoder models can't be inflated", "use a model without an encoder.")
    if any(isinstance(layer.mlp, Experts) for layer in decoder.layers):
        raise ModelError("models with experts can't be inflated", "use a dense model.")
    if any(of and of.steps for of in decoder.states):
        raise ModelError("models with layers of Mamba 2 can't be inflated", "use another model.")
    if len({*decoder.states} - {None}) > 1:
        raise ModelError("models whose layers have states of different sizes can't be inflated", "use another model.")
    if len({layer.mlp.size for layer in decoder.layers}) > 1:
        raise ModelError("models whose layers have MLPs of different sizes can't be inflated", "use another model.")
    of = decoder.attention
    return Shape(decoder.hidden_size, decoder.layers[0].mlp.size, decoder.num_layers, of.heads, of.kv_heads)


def fitting_shape(hf: Mapping[str, Any], shape: Shape) -> Shape:
    """Return a shape with the number of key heads that the family of a config.json gives it.

    Some families have as many key heads as attention heads.
    """
    decoder = read_description(hf)
    found = decoder_shape(read_description(_enlarged(hf, decoder, shape)))
    return replace(shape, num_key_value_heads=found.num_key_value_heads)


def grown_config(hf: Mapping[str, Any], small: DecoderConfig, shape: Shape) -> tuple[dict[str, Any], DecoderConfig]:
    """Return config.json at a larger shape, and the description that the family makes of it.

    Raises ConfigError if the family has no such shape, ModelError if the model's arithmetic would change.
    """
    grown = _enlarged(hf, small, shape)
    large = read_description(grown)
    found, wanted = asdict(decoder_shape(large)), asdict(shape)
    wrong = [f"{name} {found[name]}, not {size}" for name, size in wanted.items() if found[name] != size]
    if wrong:
        raise ConfigError(
            f"a model of the type {hf.get('model_type')!r} would have {', '.join(wrong)}", "choose these sizes."
        )
    layers = tuple(_resized(layer, shape, shape.hidden_size // small.hidden_size) for layer in small.layers)
    embedding = replace(small.embedding, hidden_size=shape.hidden_size, scale=large.embedding.scale)
    kept = (layers, embedding, small.norm, replace(small.head, tied=False), small.max_positions)
    if kept != (large.layers[: len(layers)], large.embedding, large.norm, large.head, large.max_positions):
        raise ModelError(
            f"a model of the type {hf.get('model_type')!r} has other arithmetic at this shape, so that its function"
            " would change",
            "keep more of the sizes of the model.",
        )
    return grown, large


def _enlarged(hf: Mapping[str, Any], small: DecoderConfig, shape: Shape) -> dict[str, Any]:
    """Return config.json with the sizes of a shape, by each name that it or its family has for them."""
    sizes = asdict(shape)
    grown = {**hf, **sizes, "head_dim": small.attention.head_dim, "tie_word_embeddings": False}
    for size, names in _OTHER_NAMES.items():
        grown |= {name: sizes[size] for name in names if name in hf}
    grown |= {key: _extended(value, shape.num_hidden_layers) for key, value in hf.items() if _is_of_layers(key, value)}
    if of := small.state:
        large = enlarged_state(of, shape.hidden_size // small.hidden_size)
        grown |= {"linear_num_key_heads": large.key_heads, "linear_num_value_heads": large.heads} if of.heads else {}
    if read_description(grown).layers[0].mlp.size != shape.intermediate_size:
        grown |= dict.fromkeys(_OTHER_NAMES["intermediate_size"], shape.intermediate_size)
        grown |= {"block_auto_adjust_ff_dim": False}
    return grown


def _is_of_layers(key: str, value: Any) -> bool:
    """Whether an entry has a value for each layer."""
    return "layer" in key and isinstance(value, list) and len(value) > 0


def _extended(values: list[Any], count: int) -> list[Any]:
    """Return values for more layers: the same ones again."""
    return (values * -(-count // len(values)))[:count]


def enlarged_state(of: State, copies: int) -> State:
    """Return the state of a model whose hidden size is `copies` times the small one's."""
    return replace(of, width=copies * of.width, heads=copies * of.heads, key_heads=copies * of.key_heads)


def _resized(layer: Layer, shape: Shape, copies: int) -> Layer:
    assert isinstance(layer.mlp, Mlp)
    resized = replace(layer, mlp=replace(layer.mlp, size=shape.intermediate_size))
    if layer.state:
        return replace(resized, state=enlarged_state(layer.state, copies))
    return resized.attending(heads=shape.num_attention_heads, kv_heads=shape.num_key_value_heads)


_Units = tuple[int, int, int]  # groups of rows, heads of each group, rows of a head
_OF_HEADS = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")  # tensors with a row for each head of a state
_SEED, _NOISE_SEED, _SCALE = 0, 1, 0.02  # of the random weights, and of noise


class NoisyFiles:
    """Tensors of floating-point numbers; matrices get normal noise of `noise` times their standard deviation.

    Raises ConfigError for a negative or infinite noise.
    """

    def __init__(self, files: WeightSource, noise: float) -> None:
        if not 0 <= noise < math.inf:
            raise ConfigError(f"noise={noise} is not a share of a standard deviation", "use 0 or more; 0.1 is much.")
        self._files, self._noise = files, noise
        self._generator = torch.Generator().manual_seed(_NOISE_SEED)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._files.names()

    def read(self, name: str) -> Tensor:
        """Read a tensor, each time with new noise."""
        stored = read_plain(self._files, name)
        if not self._noise or stored.ndim < 2:
            return stored
        drawn = torch.randn(stored.shape, generator=self._generator)
        return (stored.float() + self._noise * stored.float().std() * drawn).to(stored.dtype)


@dataclass(frozen=True)
class Enlargement:
    """From a small shape to a larger one; the heads' dimension stays. Random weights are of the type `dtype`.

    normed_together: whether one norm is of all query heads, and one of all key heads. state: that of small layers.
    Raises ConfigError if a part of the small shape has no place in the large one.
    """

    small: Shape
    large: Shape
    head_dim: int
    dtype: torch.dtype
    normed_together: bool = False
    state: State | None = None
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(_SEED))

    def __post_init__(self) -> None:
        names = ("intermediate_size", "num_hidden_layers", "num_key_value_heads", "group_size")
        pairs = [(name, getattr(self.large, name), getattr(self.small, name)) for name in names]
        problems = [f"{name} {size} is below the model's {least}" for name, size, least in pairs if size < least]
        wide, narrow = self.large.hidden_size, self.small.hidden_size
        if wide % narrow:
            problems.insert(0, f"hidden_size {wide} is not a multiple of the model's {narrow}")
        if problems:
            raise ConfigError(
                f"the shape does not hold the model: {', '.join(problems)}",
                "choose a multiple of the hidden size, and no other size below the model's (group_size ="
                " num_attention_heads / num_key_value_heads).",
            )
        sizes = (self.large.num_key_value_heads, self.small.num_key_value_heads), (
            self.large.group_size, self.small.group_size
        )  # fmt: skip
        if self.normed_together and any(wide % narrow for wide, narrow in sizes):
            raise ConfigError(
                "the model normalises all heads together, and the shape's heads are not a multiple of the model's",
                "choose a num_key_value_heads, and a group_size = num_attention_heads / num_key_value_heads, that are"
                " multiples of the model's.",
            )

    @property
    def copies(self) -> int:
        """The number of copies of the small stream in the large one."""
        return self.large.hidden_size // self.small.hidden_size

    def written(self, tensor: Tensor) -> Tensor:
        """Repeat rows [hidden, ...] that are added to the stream, or scale it."""
        return tensor.repeat(self.copies, *[1] * (tensor.ndim - 1))

    def reading(self, matrix: Tensor, name: str, streams: int = 1) -> Tensor:
        """Spread a matrix [n, streams * hidden] that reads one stream or several. Raises ModelError if that rounds."""
        return torch.cat([_spread(part, self.copies, name) for part in matrix.chunk(streams, dim=1)], dim=1)

    def grown(self, part: Part, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor of this part and name at the large shape. Raises ModelError if that rounds."""
        match part.role:
            case Role.STATE:
                return torch.cat([self.written(state) for state in tensor.chunk(part.streams)])
            case Role.TABLE:
                return tensor.repeat(1, self.copies)
            case Role.OUTPUT:
                return self.reading(tensor, name)
            case Role.BETWEEN:
                return self.written(self.reading(tensor, name, part.streams))
            case Role.READER:
                return self.reader(tensor, name, part.streams)
            case Role.READER_BIAS:
                return self.read_bias(tensor, name)
            case Role.WRITER:
                return self.writer(tensor, name)
            case Role.HEADS:
                return self._repeated(tensor, name) if self._repeats(name) else tensor
            case Role.TOKENS:
                return tensor

    def reader(self, matrix: Tensor, name: str, streams: int = 1) -> Tensor:
        """Put a layer's matrix [n, streams * hidden] that reads the stream before random rows; see `reading`."""
        if self._repeats(name):
            return self._repeated(self.reading(matrix, name, streams), name)
        made = self.random_reader(name, streams)
        return self._put(made, self.reading(matrix, name, streams), name)

    def read_bias(self, bias: Tensor, name: str) -> Tensor:
        """Put the bias [n], or other numbers of such rows, before zeros."""
        if self._repeats(name):
            return self._repeated(bias, name)
        return self._put(bias.new_zeros(self._rows(name), *bias.shape[1:]), bias, name)

    def writer(self, matrix: Tensor, name: str) -> Tensor:
        """Put a layer's matrix [hidden, n] that writes the stream before columns of zeros."""
        made = torch.zeros(self.large.hidden_size, self._rows(name), dtype=self.dtype)
        self._put(made.mT, self.written(matrix).mT, name)
        return made

    def random_reader(self, name: str, streams: int = 1) -> Tensor:
        """Make the matrix of this name with random rows alone."""
        size = self._rows(name), streams * self.large.hidden_size
        return torch.empty(size, dtype=self.dtype).normal_(0, _SCALE, generator=self._generator)

    def _rows(self, name: str) -> int:
        return sum(math.prod(places) for _, places in self._parts(name))

    def _put(self, made: Tensor, small: Tensor, name: str) -> Tensor:
        """Put the small tensor's rows [n, ...] into those of the large one, at the beginning of each part."""
        parts = self._parts(name)
        sizes = [[math.prod(each) for each in side] for side in zip(*parts, strict=True)]
        rows = zip(
            parts, *(each.split_with_sizes(own) for each, own in zip((small, made), sizes, strict=True)), strict=True
        )
        for (few, places), own, place in rows:
            place.unflatten(0, places)[: few[0], : few[1]] = own.unflatten(0, few)
        return made

    def _parts(self, name: str) -> list[tuple[_Units, _Units]]:
        """Return the parts of the side of a matrix that is not the stream's, in the small shape and in the large."""
        if self.state is not None and "linear_attn." in name:
            sides = (_state_sizes(of, name) for of in (self.state, enlarged_state(self.state, self.copies)))
            return [((few, 1, 1), (many, 1, 1)) for few, many in zip(*sides, strict=True)]
        return [(self._units(name, self.small), self._units(name, self.large))]

    def _units(self, name: str, shape: Shape) -> _Units:
        if "self_attn." not in name:
            return shape.intermediate_size, 1, 1
        per_group = 1 if any(part in name for part in ("k_proj", "v_proj", "k_norm")) else shape.group_size
        return shape.num_key_value_heads, per_group, 1 if "sinks" in name else self.head_dim

    def _repeats(self, name: str) -> bool:
        """Whether further heads repeat those of the small model in the tensor of this name."""
        return self.normed_together and any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))

    def _repeated(self, tensor: Tensor, name: str) -> Tensor:
        """Repeat the heads of a tensor [n, ...]."""
        ((rows, places),) = self._parts(name)
        times = [wide // narrow for wide, narrow in zip(places, rows, strict=True)]
        made = tensor.view(*rows, -1).repeat(*times, 1)
        return made.view(math.prod(places), *tensor.shape[1:])


def _state_sizes(of: State, name: str) -> list[int]:
    """Return the sizes of the parts of a tensor's rows, of which each has those of the small model first."""
    if "in_proj_qkv" in name or (of.heads and "conv1d" in name):
        return [of.key_size, of.key_size, of.size]
    if "in_proj." in name:
        return [of.width] * 3
    return [of.heads if name.endswith(_OF_HEADS) else of.size]


def _spread(matrix: Tensor, copies: int, name: str) -> Tensor:
    """Spread a matrix [n, hidden] that reads the stream over its copies. Raises ModelError if that would round."""
    used = 1 << (copies.bit_length() - 1)  # the largest power of two that is not above `copies`
    part = matrix / used
    if not torch.equal(part * used, matrix):
        raise ModelError(
            f"{name} holds numbers that {matrix.dtype} can't hold divided by {used}, so that the function would change",
            "convert the checkpoint to float32, which holds smaller numbers.",
        )
    return torch.cat([*[part] * used, *[torch.zeros_like(part)] * (copies - used)], dim=1)
