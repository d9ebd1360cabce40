"""Calls with an element for each argument, such as `<parameter=key>value</parameter>`: the base of these formats.

A value is text if its schema allows only texts, and JSON or Python if it allows none; text that is neither is passed on
as text. If it allows both, text is what can't be another value of its types. Texts, lists and objects are passed on
while they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from speculant.serving.tools.base import (
    SPACE,
    CallShape,
    Cursor,
    Emit,
    MalformedError,
    Rules,
    Script,
    TokenId,
    Tool,
    ToolParser,
    check_word,
    drop,
    escaped,
    json_symbol,
    literals,
    parameters,
    quoted,
    read_one,
    read_value,
    read_word,
    require,
    search,
    skip_space,
    take,
)
from speculant.serving.tools.pythonic import PYTHON
from speculant.serving.tools.schemas import (
    ANY,
    TEXT,
    any_text,
    check_plain,
    choices_in,
    in_order,
    properties_of,
    property_of,
    type_of,
    types_in,
)

_LONGEST = 32  # characters of a number or a name such as "true", beside which texts are allowed


class ParameterParser(ToolParser):
    """See the module. A format is a subclass that names the texts around each part of a call.

    name_tags, value_tags: around a function's name, and a value. key_tag: before a key. key_ends: after a key, with the
    types that each announces; None = any. end: of a call. line, gap: symbols of a grammar between a call's parts, and
    between a key and its value. outer: around a call that is written. around: around all of them.
    """

    name_tags: ClassVar[tuple[str, str]]
    key_tag: ClassVar[str]
    key_ends: ClassVar[Mapping[str, frozenset[str] | None]]
    value_tags: ClassVar[tuple[str, str]]
    end: ClassVar[str]
    line: ClassVar[str] = r'"\n"'
    gap: ClassVar[str] = ""
    outer: ClassVar[tuple[str, str]]
    around: ClassVar[tuple[str, str]] = ("", "")

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        check_word(tool)
        (before, after), name = cls.outer, tool.name.join(cls.name_tags)
        return CallShape(before, name, parameters(tool), cls.end + after, cls.markers(), cls.around, cls._write)

    @classmethod
    def _write(cls, name: str, schema: Mapping[str, Any], token_id: TokenId, compact: bool) -> Rules:
        """Return the rules of declared arguments. A text is any text, unless its schema lists the choices."""
        rules, parts = dict[str, str](), dict[str, bool]()
        for i, (key, own, required) in enumerate(properties_of(schema)):
            check_plain(key, tuple(cls.key_ends))
            values = cls._values(own, types_in(own, schema), token_id, compact)
            heads = [cls._head(key, is_text, token_id) for is_text, _ in values]
            rules[part := f"{name}_{i}"] = " | ".join(
                f"{head} {value} {cls.line}" for head, (_, value) in zip(heads, values, strict=True)
            )
            parts[part] = required
        text = any_text("text", cls.value_tags[1].lstrip(), cls.markers(), token_id) if parts else {}
        return {name: f"{cls.line} {name}_all", **in_order(f"{name}_all", parts), **rules, **text}

    @classmethod
    def _head(cls, key: str, is_text: bool, token_id: TokenId) -> str:
        end = next(end for end, types in cls.key_ends.items() if types is None or (types == TEXT) == is_text)
        before, after, value = (literals(text, cls.tags, token_id) for text in (cls.key_tag, end, cls.value_tags[0]))
        return " ".join([*before, quoted(key), *after, cls.gap, *value])

    @classmethod
    def _values(
        cls, own: Mapping[str, Any], types: frozenset[str], token_id: TokenId, compact: bool
    ) -> list[tuple[bool, str]]:
        """Return the symbols of each kind of value with its end, and whether it is text."""
        end, choices = " ".join(literals(cls.value_tags[1], cls.markers(), token_id)), choices_in(own)
        if choices is None:
            return [(True, "text")] if "string" in types else [(False, f"{json_symbol(own, compact)} {end}")]
        check_plain("".join(choice for choice in choices if isinstance(choice, str)), (cls.value_tags[1].lstrip(),))
        texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
        return [(isinstance(choice, str), f"{quoted(text)} {end}") for choice, text in zip(choices, texts, strict=True)]

    def _calls(self) -> Script:
        if self.end != self.closing:
            yield from self._call_section(self.name_tags[0], self._call)
            return
        yield from skip_space(self._cursor)
        yield from self._call()

    def _call(self) -> Script:
        cursor, before, tag = self._cursor, "{", self.key_tag
        name = yield from read_word(cursor)
        yield from require(cursor, self.name_tags[1])
        while tag == self.key_tag:
            yield from skip_space(cursor)
            tag = yield from read_one(cursor, (self.key_tag, self.end))
            if tag == self.key_tag:
                yield from self._argument(name, before)
                before = ", "
        if before == "{":
            self._begin_call(name)
        self._add_arguments("{}" if before == "{" else "}")
        self._deltas.end_call()

    def _argument(self, name: str, before: str) -> Script:
        cursor, key, ends = self._cursor, "", tuple(self.key_ends)
        while not key.endswith(ends):
            if cursor.char == "\n":
                raise MalformedError
            key += cursor.char
            yield from take(cursor, drop)
        end = next(end for end in ends if key.endswith(end))
        key = key.removesuffix(end)
        if self.value_tags[0]:
            yield from skip_space(cursor)
            yield from require(cursor, self.value_tags[0])
        elif self.gap and cursor.char == "\n":
            yield from take(cursor, drop)
        if before == "{":
            self._begin_call(name)
        self._add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from self._value(self.key_ends[end] or self._types(name, key))

    def _types(self, name: str, key: str) -> frozenset[str]:
        if (tool := self._tools.get(name)) is None:
            return ANY
        return types_in(property_of(key, parameters(tool)), parameters(tool))

    def _value(self, types: frozenset[str]) -> Script:
        """Read a value and its end."""
        cursor, end = self._cursor, self.value_tags[1]
        if "string" not in types:
            yield from skip_space(cursor)
        if "string" not in types and cursor.char in {"{", "["}:
            yield from read_value(cursor, self._add_arguments, PYTHON)
            yield from skip_space(cursor)
            yield from require(cursor, end.lstrip())
            return
        value = _Value(types, self._add_arguments)
        found = yield from search(cursor, (end, end.lstrip()), value.add)
        value.end(bool(found))
        if not found:
            raise MalformedError
        cursor.char = yield


@dataclass
class _Value:
    """Passes a value on as JSON; a text character by character, as soon as it is known to be text."""

    types: frozenset[str]
    emit: Emit
    held: list[str] = field(default_factory=list)
    is_text: bool = False

    def add(self, char: str) -> None:
        """Add a character."""
        if self.is_text:
            self.emit(escaped(char))
            return
        self.held.append(char)
        if self.types == TEXT or ("string" in self.types and not self._may_be_json()):
            self._begin_text()

    def end(self, found: bool) -> None:
        """End the value. found: it is complete."""
        value = None if self.is_text or not found else as_json("".join(self.held))
        if value is not None and self._allows(type_of(value)):
            self.emit(value)
            return
        if not self.is_text:
            self._begin_text()
        if found:
            self.emit('"')

    def _may_be_json(self) -> bool:
        first = "".join(self.held[: _LONGEST + 1]).lstrip(SPACE)[:1]
        return not first or first in "{[" or (len(self.held) <= _LONGEST and first in "-0123456789tfnTFN")

    def _allows(self, kind: str) -> bool:
        if "string" not in self.types:
            return True
        return kind != "string" and (kind in self.types or (kind == "integer" and "number" in self.types))

    def _begin_text(self) -> None:
        self.is_text = True
        self.emit('"' + escaped("".join(self.held)))


def as_json(text: str) -> str | None:
    """Return a value in JSON's or Python's syntax as JSON; None for any other text."""
    cursor, pieces = Cursor(), list[str]()
    cursor.char, *rest = [*text.strip(SPACE), ""]
    script = read_value(cursor, pieces.append, PYTHON)
    try:
        next(script)
        for char in rest:
            script.send(char)
    except (MalformedError, StopIteration) as error:
        is_whole = isinstance(error, StopIteration) and not cursor.char
        return "".join(pieces) if is_whole else None
    return None
