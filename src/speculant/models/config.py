"""Reads the parts of a decoder from a Hugging Face config.json, as far as families share them.

Each reader checks its entries. A wrong one raises a ModelError that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from speculant.errors import ModelError
from speculant.models.description import (
    Attention,
    DecoderConfig,
    Embedding,
    Encoder,
    Experts,
    Head,
    Layer,
    Mlp,
    Norm,
)
from speculant.models.entries import (
    FULL,
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    SLIDING,
    count,
    flag,
    is_whole,
    number,
    show,
)
from speculant.models.rope_config import longest_context, read_rope
from speculant.models.tensor_map import SAME_NAMES, TensorMap

Kind = TypeVar("Kind", bound=Hashable)
MASK = "pard_token"  # key of config.json
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    "relu": "relu",
}  # by the names in config.json


def read_decoder(
    hf: Mapping[str, Any],
    layers: Sequence[Layer],
    tensors: TensorMap = SAME_NAMES,
    norm: Norm | None = None,
    embedding: Mapping[str, Any] = MappingProxyType({}),
    head: Mapping[str, Any] = MappingProxyType({}),
    encoder: Encoder | None = None,
    *,
    by_kind: bool = False,
) -> DecoderConfig:
    """Read the embedding, the last norm and the head of a decoder with these layers.

    tensors: the names in the files. norm: the one before the head; None = as `read_norm` reads it. embedding, head:
    other fields of these parts. by_kind: see `longest_context`.
    """
    rotates = any(layer.attention.rope for layer in layers)
    return DecoderConfig(
        embedding=Embedding(count(hf, "vocab_size"), count(hf, "hidden_size"), mask=_read_mask(hf), **embedding),
        layers=tuple(layers),
        norm=read_norm(hf) if norm is None else norm,
        head=Head(tied=flag(hf, "tie_word_embeddings"), **head),
        max_positions=longest_context(hf, by_kind) if rotates else count(hf, "max_position_embeddings"),
        tensors=tensors,
        encoder=encoder,
    )


def _read_mask(hf: Mapping[str, Any]) -> int | None:
    """Read the mask token of a model that drafts in one pass (PARD, arXiv 2504.18583); None = it is no such model."""
    token = hf.get(MASK)
    if token is not None and not (is_whole(token) and 0 <= token < count(hf, "vocab_size")):
        raise ModelError(
            f"config.json has {MASK}={show(token)}, which is no token of the model's {count(hf, 'vocab_size')}",
            f"check {MASK} and vocab_size in config.json.",
        )
    return token


def read_norm(hf: Mapping[str, Any], key: str = "rms_norm_eps", default: float = 1e-6, **own: Any) -> Norm:
    """Read the norm that all parts of a model use; `own` has the other fields."""
    return Norm(number(hf, key, default, 1e-30, 1), **own)


def read_mlp(hf: Mapping[str, Any], *, key: str = "hidden_act", **own: Any) -> Mlp:
    """Read the feed-forward block; `own` has the other fields. key: that of the activation in config.json.

    Raises ModelError for an activation that is not implemented.
    """
    return Mlp(count(hf, "intermediate_size"), activation=_read_activation(hf, key), **own)


def read_experts(hf: Mapping[str, Any], size: str = "intermediate_size", **own: Any) -> Experts:
    """Read a layer's experts; `own` has the other fields. size: the key of one expert's width.

    Raises ModelError for an activation that is not implemented.
    """
    named = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    return Experts(
        count(hf, named, most=MOST_EXPERTS), count(hf, "num_experts_per_tok"), count(hf, size),
        activation=_read_activation(hf, "hidden_act"), **own,
    )  # fmt: skip


def _read_activation(hf: Mapping[str, Any], key: str) -> str:
    name = hf.get(key) or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(
            f"config.json asks for {key}={show(name)}; only {', '.join(ACTIVATIONS)} are implemented",
            "use a checkpoint of one of the supported families.",
        )
    return ACTIVATIONS[name]


def read_attention(hf: Mapping[str, Any], **own: Any) -> Attention:
    """Read the heads, and their rotary positions unless `own` has them; `own` has the other fields."""
    heads = count(hf, "num_attention_heads")
    if "rope" not in own:
        own["rope"] = read_rope(hf, count(hf, "max_position_embeddings"))
    return Attention(
        heads=heads,
        kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=count(hf, "head_dim", count(hf, "hidden_size") // heads, MOST_HEAD_DIM),
        **own,
    )


def windowed(layer: Layer, windows: Sequence[int | None]) -> list[Layer]:
    """Return a layer for each of these sliding windows, None = full attention; they differ in nothing else."""
    return layers_of(windows, lambda window: replace(layer, attention=replace(layer.attention, window=window)))


def layers_of(kinds: Sequence[Kind], make: Callable[[Kind], Layer]) -> list[Layer]:
    """Return a layer of each of these kinds; layers of one kind are the same object."""
    made = {kind: make(kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def count_layers(hf: Mapping[str, Any]) -> int:
    """Return the number of layers."""
    return count(hf, "num_hidden_layers", most=MOST_LAYERS)


def read_layer_types(hf: Mapping[str, Any], full: Callable[[int], bool]) -> list[str]:
    """Read the kind of each layer. full: whether a layer has full attention if config.json does not list them."""
    layers, kinds = count_layers(hf), hf.get("layer_types")
    if kinds is None or kinds == []:
        return [FULL if full(index) else SLIDING for index in range(layers)]
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ModelError(
            f"config.json has layer_types = {show(kinds)}",
            f"list one of these for each layer: {FULL}, {SLIDING}.",
        )
    if len(kinds) != layers:
        raise ModelError(
            f"config.json has {len(kinds)} layer_types for {layers} layers",
            "check layer_types and num_hidden_layers in config.json.",
        )
    return kinds


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read Qwen's windows: by layer_types, else for the layers from max_window_layers on."""
    size = window(hf) if flag(hf, "use_sliding_window") else None
    if size is None:
        return (None,) * count_layers(hf)
    first = 0 if hf.get("layer_types") else _first_window(hf)
    kinds = read_layer_types(hf, lambda index: index < first)
    return tuple(size if kind == SLIDING else None for kind in kinds)


def _first_window(hf: Mapping[str, Any]) -> int:
    first = hf.get("max_window_layers", 28)
    if not is_whole(first) or first < 0:
        raise ModelError(f"config.json has max_window_layers = {show(first)}, not a whole number", "correct it.")
    return int(first)


def window(hf: Mapping[str, Any]) -> int | None:
    """Return the positions that `sliding_window` covers; null = all of them, absent = 4096."""
    return None if hf.get("sliding_window", 4096) is None else count(hf, "sliding_window", 4096)
