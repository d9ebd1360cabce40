"""Loads heads that are decoder layers (models/heads.py): reads sizes, renames tensors and checks that they fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from speculant.drafting.heads.folder import HeadFolder, Renamed
from speculant.errors import ModelError
from speculant.models import (
    CausalLM,
    DecoderConfig,
    HeadConfig,
    Layer,
    WeightSource,
    attach,
    head_shapes,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    read_windows,
    show,
    windowed,
)

LAYER_KEYS = ("transformer_layer_config", "model")  # of config.json, whose value has the layers' sizes

Rename = Callable[[str], str | None]  # a name in the file -> the model's name; None = it is not the model's


def read_sizes(config: Mapping[str, Any], names: Collection[str], target: CausalLM) -> DecoderConfig:
    """Read the layers' sizes. The tensors' names show which biases there are; the vocabulary is the target's."""
    filled = layer_entries(config, names, target)
    norm, windows = read_norm(filled), read_windows(filled)
    attention = read_attention(
        filled,
        bias="layers.0.self_attn.q_proj.bias" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        qk_norm=norm if "layers.0.self_attn.q_norm.weight" in names else None,
    )
    layer = Layer(attention, read_mlp(filled, bias="layers.0.mlp.up_proj.bias" in names), norm, norm)
    most = read_decoder(filled, [layer]).max_positions
    return read_decoder(filled, windowed(layer, _windows(windows, most, target.max_positions)))


def layer_entries(config: Mapping[str, Any], names: Collection[str], target: CausalLM) -> dict[str, Any]:
    """Return the entries of config.json on the layers, with the number of those that there are tensors of."""
    inner = next((config[key] for key in LAYER_KEYS if key in config), config)
    if not isinstance(inner, dict):
        raise ModelError(
            f"config.json has a {' or '.join(LAYER_KEYS)} that is no object, but {show(inner)}", "correct config.json."
        )
    layers = {int(name.split(".")[1]) for name in names if name.startswith("layers.") and name.split(".")[1].isdigit()}
    stated = {key: value for key, value in inner.items() if value is not None}
    filled = {"max_position_embeddings": target.max_positions, **stated}
    return filled | {"vocab_size": target.vocab_size, "num_hidden_layers": max(len(layers), 1)}


def _windows(own: Sequence[int | None], trained: int, needed: int) -> tuple[int | None, ...]:
    """Return the sliding windows of the layers of a head that was trained for fewer positions than the target.

    Rotary positions are relative. So a row that attends to the last `trained` rows alone is computed as if the text
    began with the first of them, and a head also drafts beyond the positions that it was trained for.
    """
    if trained >= needed:
        return tuple(own)
    return tuple(trained if window is None else min(window, trained) for window in own)


def renamed(folder: HeadFolder, rename: Rename) -> Renamed:
    """Return the tensors by the model's names."""
    stored = {new: name for name in folder.names() if (new := rename(name)) is not None}
    return Renamed(folder, stored)


def load_layers(
    config: HeadConfig,
    weights: Renamed,
    target: CausalLM,
    kind: str,
    beside: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    around: Callable[[WeightSource], WeightSource] | None = None,
) -> CausalLM:
    """Check and load a head; beside: names and shapes of tensors outside of its layers. around: changes its tensors."""
    weights.check({**head_shapes(config, target), **beside}, kind)
    own = replace(weights, stored={name: stored for name, stored in weights.stored.items() if name not in beside})
    return attach(target, config, around(own) if around else own)
