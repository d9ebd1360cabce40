"""Llama 3.1 and later: `{"name": "f", "parameters": {...}}`, with or without `<|python_tag|>` before it.

Without the tag a call can only begin the text. Several calls are separated by ";" or white space.
"""

from __future__ import annotations

from speculant.serving.tools.base import ToolParser
from speculant.serving.tools.json_text import Script, drop, skip_space, take
from speculant.serving.tools.schema import CallShape, Tool, object_shape


class Parser(ToolParser):
    """See the module."""

    marker = "<|python_tag|>"

    @classmethod
    def recognises(cls, template: str) -> bool:
        """See `ToolParser.recognises`."""
        return cls.marker in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    @classmethod
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        """See `ToolParser.shape`."""
        return object_shape(tool, "", key="parameters")

    def _begin(self) -> Script:
        yield from skip_space(self._cursor)
        if self._cursor.char == "{":
            yield from self._attempt()
        self._release()

    def _calls(self) -> Script:
        yield from skip_space(self._cursor)
        yield from self._call_object()
        while self._cursor.char:
            yield from skip_space(self._cursor)
            if self._cursor.char == ";":
                yield from take(self._cursor, drop)
                yield from skip_space(self._cursor)
            yield from self._call_object()
