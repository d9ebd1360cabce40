"""Kimi K2: calls `functions.f:0<|tool_call_argument_begin|>{...}` between marks, in one section.

The text before the arguments is the call's id, which clients send back: the model counts its calls by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from speculant.serving.tools.base import (
    WORD,
    CallShape,
    Rules,
    Script,
    TokenId,
    Tool,
    ToolParser,
    check_word,
    json_symbol,
    literals,
    parameters,
    read_word,
    require,
    skip_space,
)

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiParser(ToolParser):
    """See the module."""

    marker, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    signs = (marker,)
    tags = (_BEGIN, _ARGUMENTS, _END)
    between = ""
    example_id = "functions.look_up:0"

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self._ids: set[str] = set()
        super().__init__(new_id)

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        check_word(tool)
        before, around = f"{_BEGIN}functions.{tool.name}:", (cls.marker, str(cls.closing))
        return CallShape("", before, parameters(tool), _END, cls.markers(), around, _write)

    def _calls(self) -> Script:
        yield from self._call_section(_BEGIN, self._call)

    def _call(self) -> Script:
        cursor = self._cursor
        yield from skip_space(cursor)
        call_id = yield from read_word(cursor, WORD | {":"})
        function, found, number = call_id.removeprefix("functions.").rpartition(":")
        yield from skip_space(cursor)
        yield from require(cursor, _ARGUMENTS)
        is_new = bool(found) and call_id not in self._ids
        self._ids.add(call_id)
        yield from self._call_json(function if found else number, call_id if is_new else None)
        yield from skip_space(cursor)
        yield from require(cursor, _END)


def _write(name: str, schema: Mapping[str, Any], token_id: TokenId, compact: bool) -> Rules:
    symbols = ["/[0-9]{1,4}/", *literals(_ARGUMENTS, (_ARGUMENTS,), token_id), json_symbol(schema, compact)]
    return {name: " ".join(symbols)}


Parser = KimiParser
