"""Tool calls: a parser for each format in which models write them, and the form of calls that a request requires.

A format is a module in this package, or an entry point of the group "speculant.serving.tools", that defines `Parser`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from speculant import plugins
from speculant.serving.tools.base import Delta, TextDelta, ToolDelta, ToolParser
from speculant.serving.tools.schema import CallShape, call_grammar, choose_tools, json_symbol, object_shape, read_tools

__all__ = [
    "CallShape",
    "Delta",
    "TextDelta",
    "ToolDelta",
    "ToolParser",
    "call_grammar",
    "call_schema",
    "choose_tools",
    "find_format",
    "find_parser",
    "json_symbol",
    "read_tools",
]


def find_format(template: str | None, name: str | None = None) -> type[ToolParser] | None:
    """Return the format of that name, or else the format of a chat template; None if it is unknown.

    Raises ConfigError for an unknown name.
    """
    if name is not None:
        return _load(name)
    formats = map(_load, plugins.names(__name__)) if template else ()
    return next((each for each in formats if each.recognises(template or "")), None)


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
