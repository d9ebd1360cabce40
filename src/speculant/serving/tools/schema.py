"""The form of calls that a request requires: fixed texts around arguments that fit a JSON schema."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speculant.errors import RequestError, suggest
from speculant.structured.spec import GrammarSource, with_written_bounds

TokenId = Callable[[str], int | None]  # the id of a text that is one added token; None for other texts
CUSTOM = "a tool of type 'custom' takes free text, and this server reads only calls with JSON arguments"
CUSTOM_FIX = "describe it as a function with one text as parameter."
WORD = frozenset(string.ascii_letters + string.digits + "_-.")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments; None = no arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CallShape:
    """One call as the model writes it: marker + prefix + arguments that fit `schema` + suffix.

    tags: texts within prefix and suffix that, like the marker, may be single tokens.
    """

    marker: str  # "" = none
    prefix: str
    schema: Mapping[str, Any]
    suffix: str
    tags: tuple[str, ...] = ()


def read_tools(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    """Return the functions of tools in OpenAI's form. Raises RequestError for tools of another kind or without name."""
    return [_read_tool(tool) for tool in tools]


def _read_tool(given: object) -> Tool:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "custom":
        raise RequestError(CUSTOM, CUSTOM_FIX)
    if isinstance(kind, str) and kind != "function":
        raise RequestError(
            f"a tool of type {kind[:80]!r} is not a function",
            "give only tools of type function, which the client runs; this server runs none.",
        )
    function = given.get("function") if isinstance(given, Mapping) and kind == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(
            f"a tool is not a function: {str(given)[:80]}", 'give {"type": "function", "function": {"name": ...}}.'
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise RequestError(f"a tool has the name {str(name)[:80]!r}", "give each function a printable name.")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(f"the parameters of {name!r} are not a JSON schema", 'give {"type": "object", ...}.')
    if schema is not None and not _allows_object(schema.get("type", "object")):
        raise RequestError(
            f"the parameters of {name!r} are of type {str(schema['type'])[:80]}, but arguments are an object",
            'give {"type": "object", ...}.',
        )
    return Tool(name, schema)


def _allows_object(kind: object) -> bool:
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def choose_tools(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> list[Tool]:
    """Return the tools that a `tool_choice` allows: all for "required", or one that is named in OpenAI's form.

    Raises RequestError for a choice that names none of them.
    """
    if not tools:
        raise RequestError(f"tool_choice={choice!r} needs tools", 'give tools, or tool_choice="none".')
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
    return {**tool.parameters, "type": "object"}


def check_word(tool: Tool) -> None:
    """Raise RequestError for a name that is not one word, in a format that writes names without quotes."""
    if not WORD.issuperset(tool.name):
        raise RequestError(
            f"this model can't call a function with the name {tool.name[:80]!r}",
            "use only English letters, digits, '_', '-' and '.' in its name.",
        )


def object_shape(
    tool: Tool, marker: str, before: str = "", after: str = "", key: str = "arguments", tags: tuple[str, ...] = ()
) -> CallShape:
    """Return the shape of a call `{"name": ..., key: {...}}` between two texts."""
    name = json.dumps(tool.name, ensure_ascii=False)
    return CallShape(marker, f'{before}{{"name": {name}, "{key}": ', parameters(tool), "}" + after, tags)


def call_grammar(
    shapes: Iterable[CallShape],
    token_id: TokenId,
    separator: str | None = None,
    compact: bool = False,
    instead: str | None = None,
    thought: str = "",
) -> str:
    """Return a grammar, in llguidance's dialect of Lark, for calls that each have one of these shapes.

    token_id: returns the id of a marker or tag that is one added token, and can only be written as this token;
    otherwise None. separator: the text between two calls; None = there is one call. compact: arguments have no white
    space between their parts. instead: symbols that the text may have in place of calls, such as `json_symbol`.
    thought: symbols that may precede all others.
    """
    calls = {f"call_{i}": " ".join(_symbols(shape, token_id, compact)) for i, shape in enumerate(shapes)}
    more = "" if separator is None else f" ({_quoted(separator)} call)*"
    answers = {f"call{more}": " | ".join(calls), "instead": instead}
    kept = {answer: rule for answer, rule in answers.items() if rule}
    rules = {"answer": " | ".join(kept), **{answer.split()[0]: rule for answer, rule in kept.items()}, **calls}
    first = {"start": "thought? answer", "thought": thought} if thought else {"start": "answer"}
    return "\n".join(f"{name}: {rule}" for name, rule in {**first, **rules}.items())


def json_symbol(schema: Mapping[str, Any], compact: bool) -> str:
    """Return the symbol of a grammar for JSON that fits a schema. compact: it has no white space between its parts."""
    options = {"whitespace_flexible": not compact}  # overrides the options of the schema itself
    return f"%json {json.dumps({**with_written_bounds(schema), 'x-guidance': options})}"


def form_symbol(source: GrammarSource) -> str | None:
    """Return the symbol of a form in a grammar; None for a grammar, whose rules may have the same names."""
    if source.kind == "json":
        schema = json.loads(source.text)
        return json_symbol(schema, source.compact) if isinstance(schema, dict) else None
    if source.kind == "choice":
        return "(" + " | ".join(map(json.dumps, json.loads(source.text))) + ")"
    if source.kind == "regex":
        quoted = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], source.text, flags=re.DOTALL)
        return "/(?:" + quoted.replace("\n", r"\n") + ")/"
    return None


def _symbols(shape: CallShape, token_id: TokenId, compact: bool) -> list[str]:
    tags, arguments = (shape.marker, *shape.tags), json_symbol(shape.schema, compact)
    return [*literals(shape.marker + shape.prefix, tags, token_id), arguments, *literals(shape.suffix, tags, token_id)]


def literals(text: str, tags: Iterable[str], token_id: TokenId) -> list[str]:
    """Return a text as symbols of a grammar: tags as token ids, the rest as strings."""
    tokens = {tag: token for tag in tags if tag and (token := token_id(tag)) is not None}
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    return [f"<[{tokens[piece]}]>" if piece in tokens else _quoted(piece) for piece in pieces if piece]


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
