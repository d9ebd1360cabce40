"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` once for each call.

Newer models may write `[CALL_ID]` and an id before `[ARGS]`; older ones may leave out `[ARGS]`.
"""

from __future__ import annotations

from collections.abc import Generator

from typing_extensions import override

from speculant.serving.tools.base import (
    WORD,
    CallShape,
    MalformedError,
    Script,
    Tool,
    ToolParser,
    check_word,
    drop,
    object_shape,
    parameters,
    read_object,
    require,
    short_id,
    skip_space,
    take,
)

_ARGUMENTS = "[ARGS]"


class MistralParser(ToolParser):
    """See the module. The markers are special tokens of Mistral's tokenizers."""

    marker = "[TOOL_CALLS]"
    default_id = staticmethod(short_id)

    @classmethod
    @override
    def markers(cls) -> tuple[str, ...]:
        return (cls.marker,)

    @classmethod
    @override
    def recognises(cls, template: str) -> bool:
        return cls.marker in template

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        if template is not None and _ARGUMENTS in template:
            check_word(tool)
            return CallShape(cls.marker, f"{tool.name}{_ARGUMENTS}", parameters(tool), "", (_ARGUMENTS,))
        return object_shape(tool, cls.marker, before="[", after="]")

    @classmethod
    @override
    def separator(cls, template: str | None = None) -> str | None:
        return "" if template is not None and _ARGUMENTS in template else None

    def _calls(self) -> Script:
        cursor = self._cursor
        yield from skip_space(cursor)
        if cursor.char != "[":
            yield from self._named_call()
            return
        yield from self._listed_call("[")
        while cursor.char == ",":
            yield from self._listed_call(",")
        yield from require(cursor, "]")
        cursor.raw.clear()

    def _listed_call(self, before: str) -> Script:
        yield from require(self._cursor, before)
        yield from skip_space(self._cursor)
        yield from self._call_object()
        yield from skip_space(self._cursor)

    def _named_call(self) -> Script:
        cursor = self._cursor
        name, call_id = (yield from self._word()), None
        yield from skip_space(cursor)
        if cursor.char == "[":
            yield from take(cursor, drop)
            if cursor.char == "C":
                yield from require(cursor, "CALL_ID]")
                call_id = yield from self._word()
                yield from require(cursor, "[")
            yield from require(cursor, _ARGUMENTS[1:])
        yield from skip_space(cursor)
        if cursor.char != "{":
            raise MalformedError
        self._begin_call(name, call_id)
        yield from read_object(cursor, self._add_arguments)
        self._deltas.end_call()

    def _word(self) -> Generator[None, str, str]:
        letters: list[str] = []
        while self._cursor.char in WORD:
            yield from take(self._cursor, letters.append)
        if not letters:
            raise MalformedError
        return "".join(letters)


Parser = MistralParser
