"""Reads the parts of a decoder from a Hugging Face config.json, as far as families share them.

Each reader checks its entries. A wrong one raises a ModelError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from speculant.errors import ModelError
from speculant.models.description import (
    Attention,
    DecoderConfig,
    Embedding,
    Head,
    Layer,
    Mlp,
    Norm,
)
from speculant.models.tensor_map import SAME_NAMES, TensorMap

MOST = 2**31 - 1  # sizes are int32 in kernels and files
MOST_HEAD_DIM = 2**16
MOST_THETA, MOST_FACTOR = 1e30, 1e6  # far above those of any checkpoint, and finite in float32
MOST_SHOWN = 300  # characters of a value in an error message


def read_decoder(hf: Mapping[str, Any], layers: Sequence[Layer], tensors: TensorMap = SAME_NAMES) -> DecoderConfig:
    """Read the embedding, the last norm and the head around layers. tensors: the names in the files."""
    return DecoderConfig(
        embedding=Embedding(count(hf, "vocab_size"), count(hf, "hidden_size")),
        layers=tuple(layers),
        norm=read_norm(hf),
        head=Head(tied=flag(hf, "tie_word_embeddings")),
        max_positions=count(hf, "max_position_embeddings"),
        tensors=tensors,
    )


def read_norm(hf: Mapping[str, Any]) -> Norm:
    """Read the norm that a model has everywhere."""
    return Norm(number(hf, "rms_norm_eps", 1e-6, 1e-30, 1))


def read_mlp(hf: Mapping[str, Any], bias: bool = False) -> Mlp:
    """Read the feed-forward block. Raises ModelError for another activation than SiLU."""
    if hf.get("hidden_act") not in (None, "silu", "swish"):
        raise ModelError(
            f"config.json asks for hidden_act={show(hf['hidden_act'])}; only 'silu' is implemented",
            "use a checkpoint of one of the supported families.",
        )
    return Mlp(count(hf, "intermediate_size"), bias)


def read_attention(hf: Mapping[str, Any], **own: Any) -> Attention:
    """Read the heads and their rotary positions; `own` has the other fields."""
    from speculant.models.rope_config import read_rope  # which imports this module

    heads = count(hf, "num_attention_heads")
    return Attention(
        heads=heads,
        kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=count(hf, "head_dim", count(hf, "hidden_size") // heads, MOST_HEAD_DIM),
        rope=read_rope(hf, count(hf, "max_position_embeddings")),
        **own,
    )


def windowed(layer: Layer, windows: Sequence[int | None]) -> list[Layer]:
    """Return a layer for each of these sliding windows, None = full attention; they differ in nothing else."""
    made = {
        window: replace(layer, attention=replace(layer.attention, window=window)) for window in dict.fromkeys(windows)
    }
    return [made[window] for window in windows]


_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read Qwen's windows: by layer_types, else for the layers from max_window_layers on."""
    layers = count(hf, "num_hidden_layers")
    size = window(hf) if flag(hf, "use_sliding_window") else None
    if size is None:
        return (None,) * layers
    kinds = hf.get("layer_types")
    if kinds is None or kinds == []:
        first = _first_window(hf)
        return (None,) * min(first, layers) + (size,) * max(layers - first, 0)
    if not isinstance(kinds, list) or any(kind not in _LAYER_TYPES for kind in kinds):
        raise ModelError(
            f"config.json has layer_types = {show(kinds)}",
            f"list one of these for each layer: {', '.join(_LAYER_TYPES)}.",
        )
    if len(kinds) != layers:
        raise ModelError(
            f"config.json has {len(kinds)} layer_types for {layers} layers",
            "check layer_types and num_hidden_layers in config.json.",
        )
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _first_window(hf: Mapping[str, Any]) -> int:
    first = hf.get("max_window_layers", 28)
    if not is_whole(first) or first < 0:
        raise ModelError(f"config.json has max_window_layers = {show(first)}, not a whole number", "correct it.")
    return int(first)


def show(value: Any) -> str:
    """Return the text of a value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def count(hf: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    """Return a whole number from 1 to `most`; `default` replaces an absent or null entry."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {key!r}", "the checkpoint is incomplete; download it again.")
    if not is_whole(value) or not 1 <= value <= most:
        raise _wrong(key, value, f"a positive whole number up to {most}")
    return int(value)


def number(hf: Mapping[str, Any], key: str, default: float | None, least: float, most: float) -> float:
    """Return a number from `least` to `most`; `default` replaces an absent or null entry."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _wrong(key, value, f"a number from {least:g} to {most:g}")
    return float(value)


def flag(hf: Mapping[str, Any], key: str) -> bool:
    """Return a truth value; an absent or null entry is False."""
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return bool(value)


def window(hf: Mapping[str, Any]) -> int | None:
    """Return the positions that `sliding_window` covers; null = all of them, absent = 4096."""
    return None if hf.get("sliding_window", 4096) is None else count(hf, "sliding_window", 4096)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(key: str, value: Any, expected: str) -> ModelError:
    return ModelError(f"config.json has {key} = {show(value)}, not {expected}", "correct config.json.")
