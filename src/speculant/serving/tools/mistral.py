"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` once for each call.

Newer models may write `[CALL_ID]` and an id before `[ARGS]`; older ones may leave out `[ARGS]`.
"""

from __future__ import annotations

from typing_extensions import override

from speculant.serving.tools.base import (
    CallShape,
    Script,
    Tool,
    ToolParser,
    check_word,
    drop,
    object_shape,
    parameters,
    read_word,
    require,
    short_id,
    skip_space,
    take,
)

_ARGUMENTS = "[ARGS]"


class MistralParser(ToolParser):
    """See the module. The markers are special tokens of Mistral's tokenizers."""

    marker = "[TOOL_CALLS]"
    signs = (marker,)
    default_id = staticmethod(short_id)

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        if template is not None and _ARGUMENTS in template:
            check_word(tool)
            return CallShape(cls.marker, f"{tool.name}{_ARGUMENTS}", parameters(tool), "", (_ARGUMENTS,))
        return object_shape(tool, "", tags=(cls.marker,), around=(f"{cls.marker}[", "]"))

    @classmethod
    @override
    def separator(cls, template: str | None = None) -> str | None:
        return "" if template is not None and _ARGUMENTS in template else ", "

    def _calls(self) -> Script:
        yield from skip_space(self._cursor)
        yield from self._call_list() if self._cursor.char == "[" else self._named_call()

    def _named_call(self) -> Script:
        cursor = self._cursor
        name, call_id = (yield from read_word(cursor)), None
        yield from skip_space(cursor)
        if cursor.char == "[":
            yield from take(cursor, drop)
            if cursor.char == "C":
                yield from require(cursor, "CALL_ID]")
                call_id = yield from read_word(cursor)
                yield from require(cursor, "[")
            yield from require(cursor, _ARGUMENTS[1:])
        yield from self._call_json(name, call_id)


Parser = MistralParser
