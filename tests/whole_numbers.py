"""The settings that hold whole numbers, found by their types, and values that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from speculant.params import SamplingParams

WRONG: list[Any] = [True, False, 5.0, 5.9, "5.9", "true"]


def places() -> dict[str, Callable[[Any], Any]]:
    """Return, for each setting of `SamplingParams` with whole numbers, what puts a value in the place of one."""
    found = {name: _place(hint) for name, hint in get_type_hints(SamplingParams).items()}
    return {name: place for name, place in found.items() if place is not None}


def _place(hint: Any) -> Callable[[Any], Any] | None:
    kind, inner = get_origin(hint), get_args(hint)
    if hint is int:
        return lambda value: value
    if kind is Mapping:
        return (lambda value: {value: 1.0}) if inner[0] is int else None
    within = next((place for each in inner if (place := _place(each)) is not None), None)
    if kind is Sequence and within is not None:
        return lambda value: [within(value)]
    return within
