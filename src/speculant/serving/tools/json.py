"""Calls that are the whole text: `{"name": "f", "arguments": {...}}`, several separated by ";" or white space.

No template uses this format. It is the form of calls that a request requires if the model's own format is unknown.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from speculant.serving.tools.base import CallShape, Script, Tool, ToolParser, drop, object_shape, skip_space, take


class JsonParser(ToolParser):
    """See the module."""

    marker = ""
    first: ClassVar[str] = "{"

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        return object_shape(tool, "")

    def _begin(self) -> Script:
        yield from skip_space(self._cursor)
        if self._cursor.char == self.first:
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


Parser = JsonParser
