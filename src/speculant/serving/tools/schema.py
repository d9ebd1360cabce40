"""The form that a call must have, for a request that insists on one: texts around arguments of a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speculant.errors import RequestError, suggest


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; `parameters` is the JSON schema of its arguments, None = it has none."""

    name: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CallShape:
    """One call as the model writes it: marker + prefix + arguments that fit `schema` + suffix."""

    marker: str  # may be a special token; "" = none
    prefix: str
    schema: Mapping[str, Any]
    suffix: str


def read_tools(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    """Return the functions of tools in OpenAI's form. Raises RequestError for tools of another kind or without name."""
    return [_read_tool(tool) for tool in tools]


def _read_tool(given: object) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(
            f"a tool is not a function: {str(given)[:80]}", 'give {"type": "function", "function": {"name": ...}}.'
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise RequestError(f"a tool has the name {str(name)[:80]!r}", "name each function by a printable text.")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(f"the parameters of {name!r} are no JSON schema", 'give {"type": "object", ...}.')
    return Tool(name, schema)


def choose_tools(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> list[Tool]:
    """Return the tools that a `tool_choice` leaves: all for "required", one that is named in OpenAI's form.

    Raises RequestError for a choice that names none of them.
    """
    if not tools:
        raise RequestError(f"tool_choice={choice!r} came without tools", 'give tools, or tool_choice="none".')
    if choice == "required":
        return list(tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice={str(choice)[:80]!r} does not name a function",
            'use "required", or {"type": "function", "function": {"name": ...}}.',
        )
    if found := [tool for tool in tools if tool.name == name]:
        return found[:1]
    raise RequestError(
        f"tool_choice names {name!r}, which is not among the tools", suggest(name, {t.name for t in tools})
    )


def parameters(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which are always an object."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def object_shape(tool: Tool, marker: str, before: str = "", after: str = "", key: str = "arguments") -> CallShape:
    """Return the shape of a call that is `{"name": ..., key: {...}}`, between two texts."""
    name = json.dumps(tool.name, ensure_ascii=False)
    return CallShape(marker, f'{before}{{"name": {name}, "{key}": ', parameters(tool), "}" + after)


def call_grammar(
    shapes: Iterable[CallShape], token_id: Callable[[str], int | None], separator: str | None = None
) -> str:
    """Return a grammar, in llguidance's dialect of Lark, of calls that have one of these shapes each.

    token_id: the id of a text that is one special token, else None: such a marker can only be written as its token.
    separator: what stands between two calls; None = there is one call.
    """
    rules = [" ".join(filter(None, _symbols(shape, token_id))) for shape in shapes]
    more = "" if separator is None else f" ({_quoted(separator)} call)*"
    return (
        f"start: call{more}\ncall: "
        + " | ".join(f"call_{i}" for i in range(len(rules)))
        + "".join(f"\ncall_{i}: {rule}" for i, rule in enumerate(rules))
    )


def _symbols(shape: CallShape, token_id: Callable[[str], int | None]) -> list[str]:
    special = token_id(shape.marker) if shape.marker else None
    opening = (
        [f"<[{special}]>", _quoted(shape.prefix)] if special is not None else [_quoted(shape.marker + shape.prefix)]
    )
    return [*opening, f"%json {json.dumps(shape.schema)}", _quoted(shape.suffix)]


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
