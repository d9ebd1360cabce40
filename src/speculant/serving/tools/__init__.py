"""Tool calls: the formats in which models write them.

A format is a module in this package, or an entry point of the group "speculant.serving.tools", that defines `Parser`.
"""

from __future__ import annotations

from functools import lru_cache
from json import loads
from typing import Any

from speculant import plugins
from speculant.serving.tools.base import ToolDelta, ToolParser, parse, read_tools
from speculant.text import answer_in

_ARGUMENTS = {"word": "sea"}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}, "required": ["word"]}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Explains a word.", "parameters": _SCHEMA},
}


def find_format(template: str | None, name: str | None = None) -> type[ToolParser] | None:
    """Return the format of that name, or else the format of a chat template; None if it is unknown.

    Raises ConfigError for an unknown name.
    """
    return _load(name) if name is not None else _format_in(template) if template else None


@lru_cache(maxsize=8)
def _format_in(template: str) -> type[ToolParser] | None:
    """Return the format whose signs a template contains, if it reads the call that the template writes.

    A template that writes no calls is trusted; then more signs are more certain.
    """
    found = [each for each in map(_load, plugins.names(__name__)) if each.recognises(template)]
    formats = sorted(found, key=lambda each: -len(each.signs))
    answers = [_answer(template, each.example_id) for each in formats]
    if not any(_TOOL["function"]["name"] in answer for answer in answers):
        return next(iter(formats), None)
    pairs = zip(formats, answers, strict=True)
    return next((each for each, answer in pairs if _reads_back(each(), answer)), None)


def _answer(template: str, call_id: str) -> str:
    """Return a call as a template writes it; "" if it can't."""
    call = {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": _ARGUMENTS}}
    return answer_in(template, {"role": "assistant", "content": "", "tool_calls": [call]}, [_TOOL]) or ""


def _reads_back(parser: ToolParser, answer: str) -> bool:
    pieces = [delta for delta in parse(parser.after("", read_tools([_TOOL])), [answer]) if isinstance(delta, ToolDelta)]
    arguments = "".join(delta.arguments for delta in pieces)
    names = [delta.name for delta in pieces if delta.name is not None]
    return names == [_TOOL["function"]["name"]] and not parser.is_cut and loads(arguments) == _ARGUMENTS


def _load(name: str) -> type[ToolParser]:
    parser: type[ToolParser] = plugins.load(__name__, name).Parser
    return parser
