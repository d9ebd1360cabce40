"""The config.json of a model at a larger shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from speculant.errors import ConfigError, ModelError
from speculant.lab.inflation.shapes import Shape
from speculant.models import DecoderConfig, Experts, Layer, Mlp, read_description

_OTHER_NAMES = {
    "hidden_size": ("n_embd", "word_embed_proj_dim"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
}  # that sizes have in the config.json of some families


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
