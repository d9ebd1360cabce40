"""Sizes of models, some of them by name, and the config.json of a model at a larger shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from speculant.errors import ConfigError, ModelError, suggest
from speculant.models import DecoderConfig, Experts, Layer, Mlp, read_description

_OTHER_NAMES = {
    "hidden_size": ("n_embd", "word_embed_proj_dim"),
    "intermediate_size": ("n_inner", "ffn_dim"),
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
    """Return the sizes of a model. Raises ModelError if its layers have different ones, or experts, or an encoder."""
    if decoder.encoder is not None:
        raise ModelError("encoder-decoder models can't be inflated", "use a model without an encoder.")
    if any(isinstance(layer.mlp, Experts) for layer in decoder.layers):
        raise ModelError("models with experts can't be inflated", "use a dense model.")
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
    layers = tuple(_resized(layer, shape) for layer in small.layers)
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
    if read_description(grown).layers[0].mlp.size != shape.intermediate_size:
        grown |= dict.fromkeys(_OTHER_NAMES["intermediate_size"], shape.intermediate_size)
    return grown


def _is_of_layers(key: str, value: Any) -> bool:
    """Whether an entry has a value for each layer."""
    return "layer" in key and isinstance(value, list) and len(value) > 0


def _extended(values: list[Any], count: int) -> list[Any]:
    """Return values for more layers: the same ones again."""
    return (values * -(-count // len(values)))[:count]


def _resized(layer: Layer, shape: Shape) -> Layer:
    attention = replace(layer.attention, heads=shape.num_attention_heads, kv_heads=shape.num_key_value_heads)
    assert isinstance(layer.mlp, Mlp)
    return replace(layer, attention=attention, mlp=replace(layer.mlp, size=shape.intermediate_size))
