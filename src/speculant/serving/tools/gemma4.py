"""Gemma 4: `<|tool_call>call:f{key:<|"|>text<|"|>,other:[1,{...}]}<tool_call|>`, once for each call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from speculant.serving.tools.base import (
    CallShape,
    Cursor,
    Emit,
    MalformedError,
    Rules,
    Script,
    Syntax,
    TokenId,
    Tool,
    ToolParser,
    check_word,
    escaped,
    json_symbol,
    literals,
    parameters,
    quoted,
    read_word,
    require,
    search,
    take,
)
from speculant.serving.tools.pythonic import PYTHON
from speculant.serving.tools.schemas import any_text, check_plain, choices_in, in_order, properties_of, types_in

_QUOTE = '<|"|>'
_NO_KEY = frozenset("\n{}[],")
_PARTS = {"string": "string", "object": "object", "array": "list"}  # rules of values


def _string(cursor: Cursor, emit: Emit) -> Script:
    yield from require(cursor, _QUOTE)
    emit('"')
    if not (yield from search(cursor, (_QUOTE,), lambda char: emit(escaped(char)))):
        raise MalformedError
    emit('"')
    cursor.char = yield


def _key(cursor: Cursor, emit: Emit) -> Script:
    if cursor.char == "<":
        yield from _string(cursor, emit)
        return
    emit('"')
    while cursor.char != ":":
        if cursor.char in _NO_KEY:
            raise MalformedError
        yield from take(cursor, emit, escaped(cursor.char))
    emit('"')


GEMMA = Syntax("<", _string, _key, PYTHON.literals)


class GemmaParser(ToolParser):
    """See the module."""

    marker, closing = "<|tool_call>", "<tool_call|>"
    signs = (marker, _QUOTE)
    tags = (_QUOTE,)
    between = ""

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        check_word(tool)
        before, after = f"call:{tool.name}{{", f"}}{cls.closing}"
        return CallShape(cls.marker, before, parameters(tool), after, cls.markers(), write=_write)

    def _calls(self) -> Script:
        yield from require(self._cursor, "call:")
        name = yield from read_word(self._cursor)
        yield from self._call_json(name, syntax=GEMMA)


def _write(name: str, schema: Mapping[str, Any], token_id: TokenId, compact: bool) -> Rules:
    """Write declared arguments. Of lists and objects only the kind is required, and of texts only listed choices."""
    rules, parts = dict[str, str](), dict[str, bool]()
    for i, (key, own, required) in enumerate(properties_of(schema)):
        check_plain(key, [*":<{}[],"])
        values = " | ".join(_values(own, types_in(own, schema), token_id, compact))
        rules[part := f"{name}_{i}"] = f"{json.dumps(key + ':')} ({values})"
        parts[part] = required
    quote = " ".join(literals(_QUOTE, (_QUOTE,), token_id))
    return {
        **in_order(name, parts, ","),
        **rules,
        **any_text("text", _QUOTE, (_QUOTE,), token_id),
        "string": f"{quote} text",
        "object": '"{" (pair ("," pair)*)? "}"',
        "pair": r'/[^\s:{}\[\],"<]+:/ value',
        "list": '"[" (value ("," value)*)? "]"',
        "value": f"string | object | list | {json_symbol({'type': ['number', 'boolean', 'null']}, compact)}",
    }


def _values(own: Mapping[str, Any], types: frozenset[str], token_id: TokenId, compact: bool) -> list[str]:
    if (choices := choices_in(own)) is not None and types.isdisjoint({"object", "array"}):
        texts = [choice for choice in choices if isinstance(choice, str)]
        check_plain("".join(texts), (_QUOTE,))
        quote = literals(_QUOTE, (_QUOTE,), token_id)
        others = [quoted(json.dumps(choice)) for choice in choices if not isinstance(choice, str)]
        return [" ".join([*quote, quoted(text), *quote]) for text in texts] + others
    scalars = types - _PARTS.keys()
    symbol = [json_symbol({**own, "type": sorted(scalars)}, compact)] if scalars else []
    return [part for kind, part in _PARTS.items() if kind in types] + symbol


Parser = GemmaParser
