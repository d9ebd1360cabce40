"""Finds and checks single entries of a config.json. A wrong one raises a ModelError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.errors import ModelError

MOST = 2**31 - 1  # sizes are int32 in kernels and files
MOST_HEAD_DIM, MOST_LAYERS = 2**16, 10_000
MOST_EXPERTS = 2**12  # of a layer; each has tensors of its own
MOST_THETA, MOST_FACTOR = 1e30, 1e6  # far above those of any checkpoint, and finite in float32
POSITIVE = (1e-12, 1e12)  # bounds of scales and caps
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types
MOST_SHOWN = 300  # characters of a value in an error message
_SHARED = (
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)  # entries outside of `text_config` that hold for the language model


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the language model: all, or `text_config` in the config.json of one that reads images."""
    inner = hf.get("text_config")
    if not isinstance(inner, dict) or "model_type" not in inner:
        return dict(hf)
    return {**{key: hf[key] for key in _SHARED if hf.get(key) is not None}, **inner}


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


def optional_number(hf: Mapping[str, Any], key: str) -> float | None:
    """Return a positive number; None for an absent or null entry."""
    return None if hf.get(key) is None else number(hf, key, None, *POSITIVE)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return a truth value; `default` replaces an absent or null entry."""
    value = default if hf.get(key) is None else hf[key]
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return bool(value)


def whole_numbers(hf: Mapping[str, Any], key: str) -> list[int]:
    """Return a list of whole numbers; an absent or null entry is empty."""
    value = hf.get(key)
    if value is not None and not (isinstance(value, list) and all(map(is_whole, value))):
        raise _wrong(key, value, "a list of whole numbers")
    return value or []


def filled(hf: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return all entries, with these defaults for those that are absent or null."""
    return {**hf, **{key: value for key, value in defaults.items() if hf.get(key) is None}}


def check_unset(hf: Mapping[str, Any], *keys: str) -> None:
    """Raise ModelError if one of these entries is set: it asks for arithmetic that is not implemented."""
    for key in keys:
        if hf.get(key):
            raise ModelError(
                f"config.json has {key} = {show(hf[key])}, which is not implemented",
                "use a checkpoint without it, or another engine.",
            )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(key: str, value: Any, expected: str) -> ModelError:
    return ModelError(f"config.json has {key} = {show(value)}, not {expected}", "correct config.json.")
