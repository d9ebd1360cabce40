"""Tool calls in a model's text, read while the text is generated: what every format shares.

A parser is a small automaton over characters, so its result does not depend on how the text was cut. It is written as
a generator that is sent one character at a time; "" is the end of the text. A call is a part of the output from the
moment on that its name and the first character of its arguments are known. What is malformed before that is text, and
so is what is malformed after it, from the first wrong character on; the arguments so far stay.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from speculant.serving.tools.json_text import Cursor, MalformedError, Script, read_call
from speculant.serving.tools.schema import CallShape, Tool

SPACE = " \t\r\n"


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer that is no part of a call."""

    text: str


@dataclass(frozen=True)
class ToolDelta:
    """A piece of a call: `id` and `name` come with its first piece; the joined `arguments` are a JSON object."""

    index: int  # of the call, from 0
    id: str | None
    name: str | None
    arguments: str


Delta = TextDelta | ToolDelta


def random_id() -> str:
    """Return an id in OpenAI's form."""
    return "call_" + _random_letters(24)


def short_id() -> str:
    """Return an id of nine letters and digits, which Mistral's templates insist on."""
    return _random_letters(9)


def _random_letters(count: int) -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(count))


class Deltas:
    """What was read and not fetched yet. White space beside a call belongs to neither: it is left out."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._made: list[Delta] = []
        self._space: list[str] = []  # at the end of the text so far
        self._num_calls = 0
        self.after_call = False  # whether only white space has followed the newest call

    def text(self, piece: str) -> None:
        """Add text."""
        words = piece.rstrip(SPACE)
        if words:
            self._made += (TextDelta(each) for each in (*self._space, words))
            self._space.clear()
            self.after_call = False
        self._space.append(piece[len(words) :])

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; its arguments follow."""
        self._space.clear()
        self.after_call = True
        self._made.append(ToolDelta(self._num_calls, call_id or self._new_id(), name, ""))
        self._num_calls += 1

    def arguments(self, piece: str) -> None:
        """Add to the newest call's arguments."""
        self._made.append(ToolDelta(self._num_calls - 1, None, None, piece))

    def end(self) -> None:
        """Release white space at the end of the text, unless a call precedes it."""
        if not self.after_call:
            self._made += map(TextDelta, self._space)
        self._space.clear()

    def fetch(self) -> list[Delta]:
        """Return what was added since the last time, neighbours of a kind joined."""
        made, self._made = self._made, []
        groups = groupby(made, lambda delta: delta.index if isinstance(delta, ToolDelta) else None)
        joined = (_join(list(group)) for _, group in groups)
        return [delta for delta in joined if delta != TextDelta("")]


def _join(group: Sequence[Delta]) -> Delta:
    first = group[0]
    if isinstance(first, TextDelta):
        return TextDelta("".join(delta.text for delta in group if isinstance(delta, TextDelta)))
    pieces = "".join(delta.arguments for delta in group if isinstance(delta, ToolDelta))
    return ToolDelta(first.index, first.id, first.name, pieces)


class ToolParser(ABC):
    """Tells calls from text while both are generated. A format is a subclass called `Parser` in a module of its own.

    marker: begins a call; "" = nothing does. closing: may follow a call and is left out then. The time that it takes
    is linear in the text.
    """

    marker: ClassVar[str]
    closing: ClassVar[str | None] = None
    default_id: ClassVar[Callable[[], str]] = staticmethod(random_id)

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        """`new_id` makes the calls' ids; None = random ones."""
        self._deltas = Deltas(new_id or type(self).default_id)
        self._cursor = Cursor()
        self._script = self._read()
        next(self._script)

    def feed(self, text: str) -> list[Delta]:
        """Return what has become certain with more text; only what may be a marker's beginning is held back."""
        for char in text:
            self._script.send(char)
        return self._deltas.fetch()

    def finish(self) -> list[Delta]:
        """Return the rest at the text's end; `feed` may not follow."""
        with suppress(StopIteration):
            self._script.send("")
        self._deltas.end()
        return self._deltas.fetch()

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Return what has to be in the text; where these are special tokens, decoding must not skip them."""
        return (cls.marker,) if cls.closing is None else (cls.marker, cls.closing)

    @classmethod
    @abstractmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template is written for this format."""

    @classmethod
    @abstractmethod
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        """Return the form of one call of a tool."""

    @classmethod
    def separator(cls, template: str | None = None) -> str | None:
        """Return what stands between two calls of `shape`; None if several can't be written like that."""
        return None

    @abstractmethod
    def _calls(self) -> Script:
        """Read the calls that follow a marker. Raises MalformedError; what is in `_cursor.raw` is text in the end."""

    def _read(self) -> Script:
        self._cursor.char = yield
        yield from self._begin()
        while self._cursor.char:
            found = yield from self._search()
            if found and found == self.marker:
                yield from self._attempt()
            elif found and self._deltas.after_call:
                self._cursor.raw.clear()
            self._release()

    def _begin(self) -> Script:
        """Read what counts at the beginning of the text alone."""
        yield from ()

    def _attempt(self) -> Script:
        with suppress(MalformedError):
            yield from self._calls()

    def _release(self) -> None:
        """Let what was read and not understood be text."""
        self._deltas.text("".join(self._cursor.raw))
        self._cursor.raw.clear()

    def _search(self) -> Generator[None, str, str]:
        """Pass on text up to a marker or a closing, which stays in `raw`; return it, or "" at the end."""
        cursor, held, markers = self._cursor, "", self.markers()
        while cursor.char:
            held += cursor.char
            while not any(marker.startswith(held) for marker in markers):
                self._deltas.text(held[0])
                held = held[1:]
            cursor.raw[:] = held
            cursor.char = yield
            if held in markers:
                return held
        return ""

    def _call_object(self) -> Script:
        """Read `{"name": ..., "arguments": {...}}`; "parameters" is another name for arguments."""
        name: str | None = None
        held: list[str] = []  # arguments that precede the name
        begun = False

        def argue(piece: str) -> None:
            nonlocal begun
            if name is None:
                held.append(piece)
                return
            if not begun:
                self._begin_call(name)
                begun = True
            self._argue("".join((*held, piece)))
            held.clear()

        def called(text: str) -> None:
            nonlocal name
            name = checked_name(text)
            if held:
                argue("")

        yield from read_call(self._cursor, called, argue)
        if not begun:
            raise MalformedError
        self._cursor.raw.clear()

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._deltas.begin_call(name, call_id)
        self._cursor.raw.clear()

    def _argue(self, piece: str) -> None:
        self._deltas.arguments(piece)
        self._cursor.raw.clear()


def checked_name(text: str) -> str:
    """Return a function's name; raises MalformedError for one that is empty or has control characters."""
    if not text or not text.isprintable():
        raise MalformedError
    return text


def parse(parser: ToolParser, pieces: Iterable[str]) -> list[Delta]:
    """Return everything that a parser makes of a text."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.finish()]
