"""Schemas of arguments that are not written as a JSON object: their types, and rules of a grammar for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from speculant.errors import RequestError
from speculant.serving.tools.base import Rules, TokenId, literals, quoted
from speculant.structured import MAX_CHARACTERS

ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TEXT = frozenset({"string"})
_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_DEPTH = 16  # of schemas within schemas; deeper ones are taken to allow any type


def type_of(value: str) -> str:
    """Return the type of a JSON value."""
    return _FIRST.get(value[0]) or ("number" if re.search(r"[.eE]", value) else "integer")


def types_in(
    schema: object, root: Mapping[str, Any], left: int = _DEPTH, seen: set[str] | None = None
) -> frozenset[str]:
    """Return the types that a schema allows, as far as its keywords name them. root: has the schemas it refers to."""
    if not isinstance(schema, Mapping) or not left:
        return ANY
    seen, found, given = set() if seen is None else seen, [ANY], schema.get("type")
    if isinstance(given, str | list):
        listed = [given] if isinstance(given, str) else given
        found.append(frozenset(each for each in listed if isinstance(each, str)))
    if (choices := choices_in(schema)) is not None:
        found.append(frozenset(type_of(json.dumps(choice)) for choice in choices))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(key), list) and branches:
            each = [types_in(branch, root, left - 1, seen) for branch in branches]
            found.append(ANY.intersection(*each) if key == "allOf" else frozenset[str]().union(*each))
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        found.append(types_in(_referred(reference, root), root, left - 1, seen))
    return ANY.intersection(*found)


def choices_in(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows; None if it does not list them."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else None


def property_of(key: str, schema: Mapping[str, Any]) -> object:
    """Return the schema of a property; None if there is none."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def properties_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield the properties that a schema names, each with its own schema and whether it is required.

    One that refers to definitions has a copy of them. Raises RequestError if the copies have too many characters.
    """
    shared, copied = {key: schema[key] for key in ("$defs", "definitions") if key in schema}, 0
    size = len(json.dumps(shared)) if shared else 0
    given, required = schema.get("properties"), schema.get("required")
    needed = dict.fromkeys(key for key in required if isinstance(key, str)) if isinstance(required, list) else {}
    for key in dict.fromkeys([*(given if isinstance(given, Mapping) else ()), *needed]):
        own = property_of(key, schema)
        if isinstance(own, Mapping) and isinstance(own.get("$ref"), str):
            own = _referred(own["$ref"], schema)
        refers = bool(shared) and "$ref" in json.dumps(own)
        if (copied := copied + size * refers) > MAX_CHARACTERS:
            raise RequestError(
                f"the definitions of a tool's schema, copied for each argument that refers to them, have over "
                f"{MAX_CHARACTERS} characters",
                "write short ones into the arguments themselves.",
            )
        if own is not False:
            yield key, {**(own if isinstance(own, Mapping) else {}), **(shared if refers else {})}, key in needed


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for part in reference.split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def check_plain(text: str, ends: Sequence[str]) -> None:
    """Raise RequestError for a name or value that has one of the texts which end it, or a line break."""
    if any(end in text for end in (*ends, "\n")):
        raise RequestError(
            f"this model can't write {text[:80]!r} in a call: its format has no escapes",
            f"leave out {' and '.join(map(repr, ends))} and line breaks there.",
        )


def in_order(name: str, parts: Mapping[str, bool], separator: str = "") -> Rules:
    """Return the rules of other rules in their order, of which each is required or not."""
    rules, last = {name: f"{name}_first_0"}, len(parts)
    for i, (part, required) in enumerate(parts.items()):
        first, more = f"{part} {name}_more_{i + 1}", f"{quoted(separator)} {part}"
        rules[f"{name}_first_{i}"] = first if required else f"{first} | {name}_first_{i + 1}"
        rules[f"{name}_more_{i}"] = f"{more if required else f'({more})?'} {name}_more_{i + 1}"
    return {**rules, f"{name}_first_{last}": '""', f"{name}_more_{last}": '""'}


def any_text(name: str, end: str, tags: tuple[str, ...], token_id: TokenId) -> Rules:
    """Return the rules for any text up to and including `end`. `name` stands for both."""
    symbols = literals(end, tags, token_id)
    place = next((i for i, symbol in enumerate(symbols) if symbol.startswith("<[")), None)
    if place is None:
        return {f"{name}[lazy]": f"/(?s:.*){_pattern(end)}/"}
    before = _pattern("".join(map(json.loads, symbols[:place])))  # a token can't end within a pattern
    text = f"/(?s:.*){before}/ & ~/(?s:.*){_pattern(end)}(?s:.*)/"
    return {name.upper(): text, name: " ".join([name.upper(), *symbols[place:]])}


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
