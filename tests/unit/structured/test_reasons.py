"""Errors of forms speak of the client's schema. They hold neither the library's grammars nor its options."""

from __future__ import annotations

import re
from typing import Any

import pytest

from speculant.errors import RequestError
from speculant.serving import call_grammar, find_format, read_tools
from speculant.structured import Grammars, Probed, ProbeLimits, StructuredOutputs
from speculant.structured.grammars import _check_probe

SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, "refers only to itself"),
    ({"anyOf": [{"$ref": "#"}]}, "refers only to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers only to itself"),
    ({"$ref": "#/nope"}, "'/nope' does not exist"),
    ({"$ref": "https://localhost/a.json"}, "'https://localhost/a.json', which is not part of it"),
    ({"$schema": "nope"}, "'nope', which is not part of it"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
    ({"type": "number", "minimum": 1e300}, "a bound of a number is too large"),
    ({"type": "integer", "minimum": 10**30}, "a bound of a number is too large"),
    ({"type": "number", "minimum": "a"}, "Expected a number for 'minimum'"),
    ({"type": "integer", "multipleOf": 2**53 + 1}, "'multipleOf' has too many digits"),
    ({"type": "string", "pattern": "("}, "a pattern is not valid: unclosed group"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "a" + "(b" * 300 + ")" * 300}, "a pattern is not valid"),
    ({"type": "string", "pattern": "b", "enum": ["a"]}, "no text fits"),
    ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}}, "/^a/ and /^ab/ are not disjoint"),
    ({"type": "string", "format": "nope"}, "Unknown format: nope"),
    ({"type": "string", "minLength": -1}, "'minLength'"),
    ({"type": "nope"}, "Invalid type: nope"),
    ({"type": 3}, "type must be a string"),
    ({"not": {}, "if": {}}, "Unimplemented keys"),
    ({"enum": []}, "Unsatisfiable schema"),
    ({"items": 3}, "schema must be an object"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}, ""),
    ({"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in (1, 2)]} for i in range(20)]}, "too large"),
]  # fmt: skip
INTERNAL = re.compile(
    r"coerce_one_of|lenient|x-guidance|whitespace_flexible|NoExtension|TooComplex|verbose|lexer|lark|%json|call_0|\bf64\b"
    r"|Some\(|None\b|regex parse|\(And |\(Or |\\d|0\(0|call_\d|start:|backtrace|llguidance|retriever|at \d+\(\d+\)"
)


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS, ids=lambda each: str(each)[:60])
def test_an_error_speaks_of_the_schema(grammars: Grammars, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(StructuredOutputs(json=schema)).result()
    check(str(caught.value), reason)


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS, ids=lambda each: str(each)[:60])
def test_an_error_of_a_required_call_speaks_of_the_schema(
    grammars: Grammars, schema: dict[str, Any], reason: str
) -> None:
    inner = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": inner}}]
    found = find_format(None, "json")
    assert found is not None
    grammar = call_grammar(map(found.shape, read_tools(tools)), lambda _: None, instead="%json {}")
    try:
        grammars.compile(StructuredOutputs(grammar=grammar)).result()
    except RequestError as error:
        check(str(error), "")


def check(message: str, reason: str) -> None:
    assert reason in message
    assert not INTERNAL.search(message), message
    assert len(message) < 600


def test_the_error_of_a_probe_is_the_same() -> None:
    source = StructuredOutputs(json={"$ref": "#"}).source
    for probed in (
        Probed("step", "NoExtensionBias <non-verbose/>"),
        Probed("step", "lexer error: too many <non-verbose/>"),
    ):
        with pytest.raises(RequestError) as caught:
            _check_probe(probed, ProbeLimits(1, 1), source)
        check(str(caught.value), "")
