"""Forms that are small to send and costly to compile or to follow. A number makes each request's form a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Form = dict[str, Any]


def repetitions(number: int) -> Form:
    """Nested repetitions that force a long text."""
    return {"regex": f"((a{{1000}}){{1000}}){{{number + 1}}}"}


def alternatives(number: int) -> Form:
    """Repetitions whose lexer has very many states."""
    inner = "|".join(f"[a-{chr(98 + place)}]{{1,{200 + number}}}{place}" for place in range(20))
    return {"regex": f"(({inner}){{1,100}}){{1,{100 + number}}}"}


def properties(number: int) -> Form:
    """An object with 1,500 optional properties."""
    return {"json": {"type": "object", "properties": {f"p{number}_{each}": {"type": "string"} for each in range(1500)}}}


def rules(number: int) -> Form:
    """A grammar of 1,500 rules, each of which may begin with any later one."""
    lines = [f'r{each}: "x{number}"? r{each + 1} | r{min(each + 7, 1500)} "y"' for each in range(1500)]
    return {"grammar": "start: r0\n" + "\n".join(lines) + '\nr1500: "z"'}


def lexemes(number: int) -> Form:
    """200 lexemes that all match the same texts."""
    names = " | ".join(f"L{each}" for each in range(200))
    defined = "\n".join(f"L{each}: /[a-z]{{0,{number + each + 1}}}[a-m]{{3}}[a-z]*x{each}?/" for each in range(200))
    return {"grammar": f"start: ({names})+\n{defined}"}


def references(number: int) -> Form:
    """Definitions that refer to each other in a long chain, and back."""
    chain = {
        f"d{each}": {"anyOf": [{"$ref": f"#/$defs/d{(each + step) % 500}"} for step in (1, 7)] + [{"const": number}]}
        for each in range(500)
    }
    return {"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}}


def values(number: int) -> Form:
    """An enumeration of thousands of texts."""
    return {"json": {"enum": [f"value {number} {each * 7919 % 5003}" for each in range(3000)]}}


def patterns(number: int) -> Form:
    """Patterns that all apply to the same text."""
    wanted = [{"pattern": f"^(.*{chr(97 + each)}.*){{1,{3 + number % 50}}}$"} for each in range(12)]
    return {"json": {"type": "string", "allOf": wanted}}


def pattern_properties(number: int) -> Form:
    """Objects whose keys match many patterns."""
    return {
        "json": {
            "type": "object",
            "patternProperties": {
                f"^[a-z]{{1,{20 + each + number}}}_{each}$": {"type": "string"} for each in range(60)
            },
        }
    }


def combinations(number: int) -> Form:
    """All ways to take one of two schemas, ten times."""
    pairs = [
        {"anyOf": [{"type": "object", "properties": {f"a{each}": {"const": f"{number} {way}"}}} for way in range(2)]}
        for each in range(10)
    ]
    return {"json": {"allOf": pairs}}


def followed(number: int) -> Form:
    """Cheap to compile; after some text the states of its lexer are many."""
    inner = "|".join(f"[a-z]*{first}[a-z]{{{8 + each}}}" for each, first in enumerate("abcdefghijklmnopqrst"))
    return {"regex": f"n{number}({inner}){{1,40}}"}


HOSTILE: dict[str, Callable[[int], Form]] = {
    each.__name__.replace("_", " "): each
    for each in (
        repetitions,
        alternatives,
        properties,
        rules,
        lexemes,
        references,
        values,
        patterns,
        pattern_properties,
        combinations,
        followed,
    )
}


def ordinary(number: int) -> Form:
    """A form of everyday size."""
    fields = {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": number + 9},
    }
    tags = {"type": "array", "items": {"enum": ["a", "b", f"c{number}"]}, "maxItems": 3}
    return {
        "json": {
            "type": "object",
            "properties": {**fields, "tags": tags},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    }
