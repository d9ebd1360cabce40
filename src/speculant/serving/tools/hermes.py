"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call."""

from __future__ import annotations

from typing_extensions import override

from speculant.serving.tools.base import CallShape, Script, Tool, ToolParser, object_shape, skip_space

_OTHERS = ("<function=", "<arg_key>")  # formats that share the marker: Qwen3-Coder's, GLM's


class HermesParser(ToolParser):
    """See the module."""

    marker, closing = "<tool_call>", "</tool_call>"

    @classmethod
    @override
    def recognises(cls, template: str) -> bool:
        return cls.marker in template and not any(other in template for other in _OTHERS)

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        return object_shape(tool, cls.marker, before="\n", after="\n" + cls.closing, tags=(cls.closing,))

    @classmethod
    @override
    def separator(cls, template: str | None = None) -> str | None:
        return "\n"

    def _calls(self) -> Script:
        yield from skip_space(self._cursor)
        yield from self._call_object()


Parser = HermesParser
