"""DeepSeek-V3.1: calls of a name, a separator and a JSON object between marks, in one section.

V3 and R1 write `function` and the separator before the name, and the arguments as a block of Markdown.
"""

from __future__ import annotations

from typing_extensions import override

from speculant.serving.tools.base import (
    CallShape,
    Script,
    Tool,
    ToolParser,
    check_word,
    parameters,
    read_word,
    require,
    skip_space,
)

_BEGIN, _SEPARATOR, _END, _FIRST, _LAST = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("call\u2581begin", "sep", "call\u2581end", "calls\u2581begin", "calls\u2581end")
)
_BLOCK = "```json"


class DeepSeekParser(ToolParser):
    """See the module."""

    marker, closing = _FIRST, _LAST
    signs = (marker,)
    tags = (_BEGIN, _SEPARATOR, _END)

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        check_word(tool)
        before, after = f"{_BEGIN}{tool.name}{_SEPARATOR}", _END
        if template is not None and _BLOCK in template:
            before, after = f"{_BEGIN}function{_SEPARATOR}{tool.name}\n{_BLOCK}\n", f"\n```{_END}"
        return CallShape("", before, parameters(tool), after, cls.markers(), (_FIRST, _LAST))

    @classmethod
    @override
    def separator(cls, template: str | None = None) -> str | None:
        return "\n" if template is not None and _BLOCK in template else ""

    def _calls(self) -> Script:
        yield from self._call_section(_BEGIN, self._call)

    def _call(self) -> Script:
        cursor = self._cursor
        name = yield from read_word(cursor)
        yield from require(cursor, _SEPARATOR)
        yield from skip_space(cursor)
        if in_block := cursor.char != "{":
            name = yield from read_word(cursor)
            yield from skip_space(cursor)
            yield from require(cursor, _BLOCK)
        yield from self._call_json(name)
        yield from skip_space(cursor)
        if in_block:
            yield from require(cursor, "```")
            yield from skip_space(cursor)
        yield from require(cursor, _END)


Parser = DeepSeekParser
