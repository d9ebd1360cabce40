"""Tool calls: a parser for each format in which models write them, and the form of calls that a request requires.

A format is a module in this package, or an entry point of the group "speculant.serving.tools", that defines `Parser`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from json import loads
from typing import Any

from speculant import plugins
from speculant.serving.tools.base import (
    CallShape,
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenId,
    ToolDelta,
    ToolParser,
    call_grammar,
    choose_tools,
    form_symbol,
    json_symbol,
    object_shape,
    parse,
    read_tools,
)
from speculant.text import answer_in

_ARGUMENTS = {"word": "sea"}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}, "required": ["word"]}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Explains a word.", "parameters": _SCHEMA},
}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": _ARGUMENTS}}

__all__ = [
    "CallShape",
    "Delta",
    "ReasoningDelta",
    "TextDelta",
    "TokenId",
    "ToolDelta",
    "ToolParser",
    "call_grammar",
    "call_schema",
    "choose_tools",
    "find_format",
    "find_parser",
    "form_symbol",
    "json_symbol",
    "read_tools",
]


def find_format(template: str | None, name: str | None = None) -> type[ToolParser] | None:
    """Return the format of that name, or else the format of a chat template; None if it is unknown.

    Raises ConfigError for an unknown name.
    """
    return _load(name) if name is not None else _format_in(template) if template else None


@lru_cache(maxsize=8)
def _format_in(template: str) -> type[ToolParser] | None:
    """Return the format whose marker a template contains, if it reads the call that the template writes.

    A template that writes no calls is trusted.
    """
    formats = [each for each in map(_load, plugins.names(__name__)) if each.recognises(template)]
    answer = (
        answer_in(template, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, [_TOOL]) if formats else ""
    )
    if not answer or _TOOL["function"]["name"] not in answer:
        return next(iter(formats), None)
    return next((each for each in formats if _reads_back(each(), answer)), None)


def _reads_back(parser: ToolParser, answer: str) -> bool:
    pieces = [delta for delta in parse(parser, [answer]) if isinstance(delta, ToolDelta)]
    arguments = "".join(delta.arguments for delta in pieces)
    names = [delta.name for delta in pieces if delta.name is not None]
    return names == [_TOOL["function"]["name"]] and not parser.is_cut and loads(arguments) == _ARGUMENTS


def find_parser(
    template: str | None, name: str | None = None, new_id: Callable[[], str] | None = None
) -> ToolParser | None:
    """Return a parser for one answer, in the format of `find_format`. new_id: makes call ids; None = random."""
    found = find_format(template, name)
    return None if found is None else found(new_id)


def call_schema(
    tools: Iterable[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    template: str | None = None,
    name: str | None = None,
) -> list[CallShape]:
    """Return the forms of a required call, in the model's format: one for each tool that `tool_choice` allows.

    tools and choice are in OpenAI's form; the choice is "required" or a named function. A model whose format is unknown
    writes `{"name": ..., "arguments": ...}`. Raises RequestError for invalid tools or an invalid choice.
    """
    found = find_format(template, name)
    chosen = choose_tools(read_tools(tools), choice)
    return [found.shape(tool, template) if found else object_shape(tool, "") for tool in chosen]


def _load(name: str) -> type[ToolParser]:
    parser: type[ToolParser] = plugins.load(__name__, name).Parser
    return parser
