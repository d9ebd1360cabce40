"""Bounds of any size are accepted, and every number that a form allows is within them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest

from speculant.structured import Grammars, StructuredOutputs, with_written_bounds
from tests import automata
from tests.models import END

INT64, SAFE, DOUBLE = 2**63, 2**53, 1.7976931348623157e308
BOUNDS: list[dict[str, Any]] = [
    {"minimum": -INT64, "maximum": INT64 - 1},
    {"minimum": 1 - SAFE, "maximum": SAFE - 1},  # zod's integers
    {"exclusiveMinimum": -INT64 - 1, "exclusiveMaximum": INT64},
    {"minimum": 0, "maximum": 2**64 - 1},
    {"minimum": -DOUBLE, "maximum": DOUBLE},
    {"minimum": -1e308, "exclusiveMaximum": 1e300},
    {"minimum": SAFE + 1, "maximum": SAFE + 5},  # no float64
    {"minimum": -SAFE - 5, "maximum": -SAFE - 1},
    {"maximum": 1e20},
    {"minimum": -1e20},
    {"minimum": 0.1, "maximum": 10**30},
    {"exclusiveMinimum": 0, "maximum": 1e18},
]
TINY: list[dict[str, Any]] = [
    {"minimum": 5e-324},
    {"exclusiveMinimum": 1e-200, "maximum": 1},
    {"maximum": -1e-100},
    {"minimum": -5e-324},
    {"minimum": -1, "exclusiveMaximum": 1e-300},
]
COMPARE = {
    "minimum": lambda value, bound: value >= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
NUMBERS = sorted(
    {
        sign * (value + step)
        for value in (0, 1, 10, SAFE, 10**17, 10**18, INT64, 2**64, 10**19, 10**20, 10**25)
        for step in (-1025, -1024, -1023, -2, -1, 0, 1, 2, 1024)
        for sign in (1, -1)
    }
)
TINIEST = "0." + "0" * 59 + "1"
FRACTIONS = ["0.5", "-0.5", "0.0", TINIEST, f"-{TINIEST}", "1000000000000000000.5", "0.11", "0.09"]


def allowed(grammars: Grammars, schema: dict[str, Any], texts: Iterable[str]) -> set[str]:
    """Return the texts that have a form."""
    constraint = grammars.compile(StructuredOutputs(json=schema)).result().constrain()
    encode = grammars._tokenizer.encode
    return {text for text in texts if END in automata.allowed(constraint.mask(encode(text)), END + 1)}


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        *itertools.product(("integer", "number", ["integer", "null"], None), BOUNDS),
        *itertools.product(("number",), TINY),
    ],
    ids=str,
)
def test_what_a_form_allows_is_within_its_bounds(grammars: Grammars, kind: Any, bounds: dict[str, Any]) -> None:
    schema = bounds if kind is None else {"type": kind, **bounds}
    texts = [*map(str, NUMBERS), *(FRACTIONS if kind in ("number", None) else ())]
    found = allowed(grammars, schema, texts)
    valid = {
        text
        for text in texts
        if all(COMPARE[key](Decimal(text), Decimal(repr(bound))) for key, bound in bounds.items())
    }
    assert found
    assert found <= valid
    refused = {abs(Decimal(text)) for text in valid - found}
    assert not [value for value in refused if 10**-50 < value < SAFE], "near enough"


@pytest.mark.parametrize("name", ["minimum", "enum", "const"])
def test_only_bounds_are_changed(name: str) -> None:
    value = {"minimum": -1e300, "const": {"maximum": 1e300}}
    schema = {
        "properties": {
            name: {"type": "string", "minLength": 1},
            "a": {"minimum": True, "items": [{"maximum": 10**30}]},
        },
        "enum": [value],
        "const": value,
        "default": value,
        "multipleOf": 1e300,
    }
    changed = with_written_bounds(schema)
    assert changed["properties"]["a"]["items"] == [{"maximum": 10**18}]
    changed["properties"]["a"]["items"] = schema["properties"]["a"]["items"]  # type: ignore[index]
    assert changed == schema


def test_options_of_the_library_have_no_effect(grammars: Grammars) -> None:
    schema = {
        "type": "array",
        "items": {"const": 1},
        "minItems": 2,
        "x-guidance": {"item_separator": ";", "lenient": True},
    }
    assert allowed(grammars, schema, ["[1, 1]", "[1;1]"]) == {"[1, 1]"}
