"""Lists of calls in Python, as LFM2 writes them: `<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>`.

Without marks, as Llama 3.2 and 4 may write it, a list can only begin the text. A list of JSON objects is read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from speculant.serving.tools.base import (
    HEX,
    WORD,
    CallShape,
    Cursor,
    Emit,
    Rules,
    Script,
    Syntax,
    TokenId,
    Tool,
    check_word,
    drop,
    escaped,
    json_symbol,
    one_of,
    parameters,
    read_value,
    read_word,
    require,
    skip_space,
    take,
)
from speculant.serving.tools.json import JsonParser
from speculant.serving.tools.schemas import check_plain, in_order, properties_of, types_in

_DIGITS = {"x": 2, "u": 4, "U": 8}  # of escapes


def _string(cursor: Cursor, emit: Emit) -> Script:
    """Read a string. Templates do not escape quotes within it, so the last one is the one before a delimiter."""
    quote, is_open = cursor.char, True
    yield from take(cursor, emit, '"')
    while is_open:
        if cursor.char == quote:
            space: list[str] = []
            yield from take(cursor, drop)
            yield from skip_space(cursor, space.append)
            is_open = cursor.char not in {"", ",", ")", "]", "}", ":"}
            emit(escaped(quote + "".join(space)) if is_open else '"' + "".join(space))
        elif cursor.char == "\\":
            yield from take(cursor, drop)
            yield from _escape(cursor, emit)
        else:
            yield from take(cursor, emit, escaped(cursor.char))


def _escape(cursor: Cursor, emit: Emit) -> Script:
    """Read an escape after its backslash, which is kept if the next character makes none."""
    if cursor.char and cursor.char in '"/bfnrt\\':
        yield from take(cursor, emit, "\\" + cursor.char)
    elif cursor.char == "'":
        yield from take(cursor, emit)
    elif cursor.char in _DIGITS:
        digits, count = list[str](), _DIGITS[cursor.char]
        yield from take(cursor, drop)
        for _ in range(count):
            yield from one_of(cursor, digits.append, HEX)
        emit(json.dumps(chr(min(int("".join(digits), 16), 0x10FFFF)))[1:-1])
    else:
        emit("\\\\")


_NAMES = {
    each[0]: (each, other)
    for each, other in {"True": "true", "False": "false", "None": "null"}.items()
    for each in (each, other)
}
PYTHON = Syntax("\"'", _string, _string, _NAMES)


class PythonicParser(JsonParser):
    """See the module."""

    marker, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    first = "["
    between = ", "

    @classmethod
    @override
    def recognises(cls, template: str) -> bool:
        return cls.marker in template or "func_name1(" in template

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        """Values are written as JSON, except for booleans and None."""
        check_word(tool)
        marks = template is None or cls.marker in template
        around = (f"{cls.marker}[", f"]{cls.closing}") if marks else ("[", "]")
        return CallShape("", f"{tool.name}(", parameters(tool), ")", cls.markers(), around, _write)

    def _calls(self) -> Script:
        yield from self._call_list()

    @override
    def _listed_call(self) -> Script:
        if self._cursor.char == "{":
            yield from self._call_object()
            return
        cursor, before = self._cursor, "{"
        name = yield from read_word(cursor)
        yield from require(cursor, "(")
        yield from skip_space(cursor)
        while cursor.char != ")":
            key = yield from read_word(cursor)
            yield from skip_space(cursor)
            yield from require(cursor, "=")
            if before == "{":
                self._begin_call(name)
            self._add_arguments(f"{before}{json.dumps(key)}: ")
            yield from skip_space(cursor)
            yield from read_value(cursor, self._add_arguments, PYTHON)
            yield from skip_space(cursor)
            before = ", "
            if cursor.char != ")":
                yield from require(cursor, ",")
                yield from skip_space(cursor)
        if before == "{":
            self._begin_call(name)
        yield from take(cursor, drop)
        self._add_arguments("{}" if before == "{" else "}")
        self._deltas.end_call()


def _write(name: str, schema: Mapping[str, Any], token_id: TokenId, compact: bool) -> Rules:
    rules, parts = dict[str, str](), dict[str, bool]()
    for i, (key, own, required) in enumerate(properties_of(schema)):
        check_plain(key, sorted(set(key) - WORD))
        types = types_in(own, schema)
        value = {frozenset({"boolean"}): '("True" | "False")', frozenset({"null"}): '"None"'}.get(types)
        rules[part := f"{name}_{i}"] = f"{json.dumps(key + '=')} {value or json_symbol(own, compact)}"
        parts[part] = required
    return {**in_order(name, parts, ", "), **rules}


Parser = PythonicParser
