"""The form of an output is checked as soon as it is given."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from speculant.errors import ConfigError, RequestError, SpeculantError
from speculant.params import SamplingParams
from speculant.structured import MAX_CHARACTERS, MAX_CHOICES, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


@pytest.mark.parametrize("given", [{"json": SCHEMA}, {"regex": "a+"}, {"choice": ["x", "y"]}, {"json_object": True}])
def test_structured_outputs_are_read_from_a_mapping(given: dict[str, Any]) -> None:
    params = SamplingParams.from_mapping({"structured_outputs": given})
    assert params.structured_outputs == StructuredOutputs(**given)
    assert pickle.loads(pickle.dumps(params)) == params


def test_equal_forms_have_one_source() -> None:
    text = json.dumps(SCHEMA, indent=2)
    assert StructuredOutputs(json=SCHEMA).source == StructuredOutputs(json=text).source
    assert StructuredOutputs(choice=["x"]).source == StructuredOutputs(choice=("x",)).source
    assert StructuredOutputs(json=SCHEMA).source != StructuredOutputs(json=SCHEMA, disable_any_whitespace=True).source


def test_the_order_of_a_schema_s_keys_matters() -> None:
    properties = dict(reversed(SCHEMA["properties"].items()))  # type: ignore[attr-defined]
    assert StructuredOutputs(json={**SCHEMA, "properties": properties}).source != StructuredOutputs(json=SCHEMA).source


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


INVALID: list[tuple[Any, type[SpeculantError], str]] = [
    ({}, ConfigError, "has none of"),
    ({"json": SCHEMA, "regex": "a"}, ConfigError, "json and regex"),
    ({"json_object": False}, ConfigError, "has none of"),
    ({"json_object": 1}, ConfigError, "not a truth value"),
    ({"regex": "a", "disable_any_whitespace": "yes"}, ConfigError, "not a truth value"),
    ({"regx": "a"}, ConfigError, "did you mean 'regex'"),
    ("a+", ConfigError, "structured_outputs is a str"),
    ({"regex": 3}, ConfigError, "regex of structured_outputs is a int"),
    ({"grammar": ["start"]}, ConfigError, "grammar of structured_outputs is a list"),
    ({"choice": "yes"}, ConfigError, "not a list of texts"),
    ({"choice": ["yes", 3]}, ConfigError, "not a list of texts"),
    ({"choice": []}, RequestError, "has 0 texts"),
    ({"choice": ["x"] * (MAX_CHOICES + 1)}, RequestError, f"has {MAX_CHOICES + 1} texts"),
    ({"choice": ["x" * MAX_CHARACTERS]}, RequestError, "characters, more than"),
    ({"regex": "x" * (MAX_CHARACTERS + 1)}, RequestError, "characters, more than"),
    ({"grammar": "x" * (MAX_CHARACTERS + 1)}, RequestError, "characters, more than"),
    ({"json": json.dumps({"const": "x" * MAX_CHARACTERS})}, RequestError, "characters, more than"),
    ({"json": {"const": "x" * MAX_CHARACTERS}}, RequestError, "characters, more than"),
    ({"json": "[1, 2"}, RequestError, "not valid JSON"),
    ({"json": [1, 2]}, ConfigError, "is a list"),
    ({"json": "true"}, ConfigError, "is a bool"),
    ({"json": {"const": {1, 2}}}, ConfigError, "is not JSON"),
    ({"json": deep(40)}, RequestError, "levels deep"),
    ({"json": "[" * 50_000}, RequestError, "levels deep"),
    ({"json": json.dumps(deep(40))}, RequestError, "levels deep"),
    ({"regex": "\ud800"}, RequestError, "not valid Unicode"),
    ({"choice": ["\ud800"]}, RequestError, "not valid Unicode"),
]


@pytest.mark.parametrize(("given", "kind", "says"), INVALID, ids=lambda value: str(value)[:30])
def test_structured_outputs_are_refused(given: Any, kind: type[SpeculantError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        SamplingParams(structured_outputs=given)
    assert len(str(caught.value)) < 400


def test_a_beam_search_has_no_form() -> None:
    with pytest.raises(ConfigError, match="structured_outputs=.* can't be combined with beam_width"):
        SamplingParams(beam_width=2, structured_outputs=StructuredOutputs(regex="a"))
