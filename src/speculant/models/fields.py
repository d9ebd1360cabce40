"""Entries of a config, read with a type and a range. A wrong entry raises a ModelError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.errors import ModelError

MOST = 2**31 - 1  # sizes are int32 in kernels and files
_MOST_SHOWN = 300  # characters


def show(value: Any) -> str:
    """Return the text of a value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


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
