"""JSON read one character at a time. Each function is a generator that reads a part of it; see `ToolParser`.

Characters are passed on as soon as they are valid. There is one repair: a control character within a string, which
models write for a line break, is passed on as its escape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

Script = Generator[None, str, None]
Emit = Callable[[str], None]

_SPACE = frozenset(" \t\r\n")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}


class MalformedError(Exception):
    """The text is not a call of the format."""


class Cursor:
    """The next character ("" at the end of the text), and in `raw` the characters read but not yet output."""

    def __init__(self) -> None:
        self.char = ""
        self.raw: list[str] = []


def take(cursor: Cursor, emit: Emit, instead: str | None = None) -> Script:
    """Read any character and pass it on, or `instead` if given."""
    if not cursor.char:
        raise MalformedError
    cursor.raw.append(cursor.char)
    emit(instead or cursor.char)
    cursor.char = yield


def drop(piece: str) -> None:
    """Ignore a piece."""


def require(cursor: Cursor, text: str, emit: Emit = drop) -> Script:
    """Read exactly this text."""
    for char in text:
        if cursor.char != char:
            raise MalformedError
        yield from take(cursor, emit)


def skip_space(cursor: Cursor, emit: Emit = drop) -> Script:
    """Read white space, if there is any."""
    while cursor.char in _SPACE:
        yield from take(cursor, emit)


def read_call(cursor: Cursor, named: Emit, emit: Emit, ended: Callable[[], None]) -> Script:
    """Read `{"name": "f", "arguments": {...}}` with keys in any order. Only the keys id and type may be added.

    `named` gets the name, `emit` the arguments, and `ended` is called after these. Raises MalformedError at the first
    character that does not fit.
    """
    yield from require(cursor, "{")
    keys: set[str] = set()
    while True:
        yield from skip_space(cursor)
        key = _KEYS.get((yield from read_text(cursor)))
        if key is None or key in keys:
            raise MalformedError
        keys.add(key)
        yield from skip_space(cursor)
        yield from require(cursor, ":")
        yield from skip_space(cursor)
        if key == "name":
            named((yield from read_text(cursor)))
        elif key == "arguments":
            yield from read_object(cursor, emit)
            ended()
        else:
            yield from read_value(cursor, drop)
        yield from skip_space(cursor)
        if cursor.char != ",":
            break
        yield from take(cursor, drop)
    yield from require(cursor, "}")


def read_text(cursor: Cursor) -> Generator[None, str, str]:
    """Read a string and return its text."""
    pieces: list[str] = []
    yield from _string(cursor, pieces.append)
    return str(json.loads("".join(pieces)))


def read_object(cursor: Cursor, emit: Emit) -> Script:
    """Read an object."""
    if cursor.char != "{":
        raise MalformedError
    yield from read_value(cursor, emit)


def read_value(cursor: Cursor, emit: Emit) -> Script:
    """Read a value without recursion: it may be nested to any depth."""
    closers: list[str] = []
    while True:
        yield from skip_space(cursor, emit)
        if cursor.char in _CLOSERS:
            closers.append(_CLOSERS[cursor.char])
            yield from take(cursor, emit)
            yield from skip_space(cursor, emit)
            if cursor.char != closers[-1]:
                yield from _key(cursor, emit, closers[-1])
                continue
        else:
            yield from _scalar(cursor, emit)
        if not (yield from _close(cursor, emit, closers)):
            return
        yield from _key(cursor, emit, closers[-1])


def _close(cursor: Cursor, emit: Emit, closers: list[str]) -> Generator[None, str, bool]:
    """Close the objects and lists that end after a value. Return whether a comma and another value follow."""
    while closers:
        yield from skip_space(cursor, emit)
        if cursor.char != closers[-1]:
            yield from require(cursor, ",", emit)
            return True
        closers.pop()
        yield from take(cursor, emit)
    return False


def _key(cursor: Cursor, emit: Emit, closer: str) -> Script:
    """Read a key and its colon, in an object."""
    if closer == "}":
        yield from skip_space(cursor, emit)
        yield from _string(cursor, emit)
        yield from skip_space(cursor, emit)
        yield from require(cursor, ":", emit)


def _scalar(cursor: Cursor, emit: Emit) -> Script:
    if cursor.char == '"':
        yield from _string(cursor, emit)
    elif cursor.char in _LITERALS:
        yield from require(cursor, _LITERALS[cursor.char], emit)
    else:
        yield from _number(cursor, emit)


def _string(cursor: Cursor, emit: Emit) -> Script:
    yield from require(cursor, '"', emit)
    while cursor.char != '"':
        if cursor.char == "\\":
            yield from take(cursor, emit)
            yield from _escaped(cursor, emit)
        elif cursor.char < " ":
            yield from take(cursor, emit, instead=json.dumps(cursor.char)[1:-1])
        else:
            yield from take(cursor, emit)
    yield from take(cursor, emit)


def _escaped(cursor: Cursor, emit: Emit) -> Script:
    if cursor.char in _ESCAPES:
        yield from take(cursor, emit)
        return
    yield from require(cursor, "u", emit)
    for _ in range(4):
        yield from _one_of(cursor, emit, _HEX)


def _number(cursor: Cursor, emit: Emit) -> Script:
    if cursor.char == "-":
        yield from take(cursor, emit)
    if cursor.char == "0":
        yield from take(cursor, emit)
    else:
        yield from _digits(cursor, emit)
    if cursor.char == ".":
        yield from take(cursor, emit)
        yield from _digits(cursor, emit)
    if cursor.char in {"e", "E"}:
        yield from take(cursor, emit)
        if cursor.char in {"+", "-"}:
            yield from take(cursor, emit)
        yield from _digits(cursor, emit)


def _digits(cursor: Cursor, emit: Emit) -> Script:
    yield from _one_of(cursor, emit, _DIGITS)
    while cursor.char in _DIGITS:
        yield from take(cursor, emit)


def _one_of(cursor: Cursor, emit: Emit, allowed: frozenset[str]) -> Script:
    if cursor.char not in allowed:
        raise MalformedError
    yield from take(cursor, emit)
