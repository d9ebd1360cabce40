"""Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` for each call.

A list of such objects is read too.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from speculant.serving.tools.base import CallShape, Script, Tool, ToolParser, object_shape, skip_space


class HermesParser(ToolParser):
    """See the module."""

    marker = "<tool_call>"
    closing: ClassVar[str | None] = "</tool_call>"
    signs: ClassVar[tuple[str, ...]] = (marker,)
    between = "\n"

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        return object_shape(tool, cls.marker, before="\n", after=f"\n{cls.closing}", tags=cls.markers())

    def _calls(self) -> Script:
        yield from skip_space(self._cursor)
        yield from self._call_list() if self._cursor.char == "[" else self._call_object()


Parser = HermesParser
