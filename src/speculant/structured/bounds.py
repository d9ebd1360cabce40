"""Bounds of numbers in JSON schemas, as far as the grammar library can write them.

It writes the numbers within bounds digit by digit, and computes bounds in float64. A bound that it can't write is moved
inwards to the next one that it can, so every number that it allows is valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST = 10**18  # beyond it the library writes no bound of a number
SMALLEST = 1e-60  # below it the library's expression is nested too deep
LOWEST_INTEGER = -(2**63) + 1024  # the lowest float64 above the lowest int64
HIGHEST_INTEGER = 2**63 - 1
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are no schemas
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def with_written_bounds(schema: Any) -> Any:
    """Return a schema whose bounds the library can write. Every value that it allows is valid for the given one."""
    if isinstance(schema, list):
        return [with_written_bounds(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kinds = schema.get("type")
    is_integer = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    return {key: _keyword(key, value, is_integer) for key, value in schema.items()}


def _keyword(key: str, value: Any, is_integer: bool) -> Any:
    if key in _LOW + _HIGH and isinstance(value, int | float) and not isinstance(value, bool):
        return value if not math.isfinite(value) else _bound(value, key in _LOW, is_integer)
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: with_written_bounds(each) for name, each in value.items()}
    return value if key in _VALUES else with_written_bounds(value)


def _bound(value: float, is_low: bool, is_integer: bool) -> float:
    """Return the bound itself, or the next one inwards: upwards for a low bound, downwards for a high one."""
    if is_integer:
        value = max(value, LOWEST_INTEGER) if is_low else min(value, HIGHEST_INTEGER)
        if not is_low and value == HIGHEST_INTEGER:
            return value  # which the library reads as float64, and limits to int64
    else:
        value = max(value, -LARGEST) if is_low else min(value, LARGEST)
        if 0 < abs(value) < SMALLEST:
            inwards = (value > 0) == is_low  # away from zero
            value = math.copysign(SMALLEST, value) if inwards else 0
    return _as_float64(value, is_low)


def _as_float64(value: float, is_low: bool) -> float:
    """Return the nearest float64 inwards; integers stay integers."""
    nearest = float(value)
    if nearest < value and is_low:
        nearest = math.nextafter(nearest, math.inf)
    elif nearest > value and not is_low:
        nearest = math.nextafter(nearest, -math.inf)
    return int(nearest) if isinstance(value, int) else nearest
