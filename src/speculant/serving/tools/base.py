"""The base of all formats of tool calls: the form of calls that a request requires, and calls read from a text.

The form is fixed texts around arguments that fit a JSON schema. Where a format does not write them as a JSON object, it
has rules of its own for the grammar, and its parser makes the object.

A parser reads a text while it is generated. It is a small automaton over characters, so its result does not depend on
how the text is split. It is a generator that receives one character at a time; "" is the end of the text. A call is
output as soon as its name and the first character of its arguments are known. Malformed text before that point is
output as text. After it, text is output as text from the first wrong character on, and the arguments so far remain.

JSON is passed on as soon as it is valid. There is one repair: a control character within a string, which models write
for a line break, is passed on as its escape.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Self

from typing_extensions import override

from speculant.errors import RequestError, suggest
from speculant.structured import GrammarSource, with_written_bounds

TokenId = Callable[[str], int | None]  # the id of a text that is one added token; None for other texts
Rules = dict[str, str]  # of a grammar, by name
Writer = Callable[[str, Mapping[str, Any], TokenId, bool], Rules]  # name, schema, token_id, compact: see `call_grammar`
CUSTOM = "a tool of type 'custom' takes free text, and this server reads only calls with JSON arguments"
CUSTOM_FIX = "describe it as a function with one text as parameter."
WORD = frozenset(string.ascii_letters + string.digits + "_-.")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments; None = no arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CallShape:
    """One call as the model writes it: marker + prefix + arguments that fit `schema` + suffix.

    tags: texts within the others that, like the marker, may be single tokens. around: texts before the first call and
    after the last. write: returns the rules of the arguments, of which one has the given name; None = a JSON object.
    """

    marker: str  # "" = none
    prefix: str
    schema: Mapping[str, Any]
    suffix: str
    tags: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")
    write: Writer | None = None


def read_tools(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    """Return the functions of tools in OpenAI's form. Raises RequestError for tools of another kind or without name."""
    return [_read_tool(tool) for tool in tools]


def _read_tool(given: object) -> Tool:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "custom":
        raise RequestError(CUSTOM, CUSTOM_FIX)
    if isinstance(kind, str) and kind != "function":
        raise RequestError(
            f"a tool of type {kind[:80]!r} is not a function",
            "give only tools of type function, which the client runs; this server runs none.",
        )
    function = given.get("function") if isinstance(given, Mapping) and kind == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(
            f"a tool is not a function: {str(given)[:80]}", 'give {"type": "function", "function": {"name": ...}}.'
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise RequestError(f"a tool has the name {str(name)[:80]!r}", "give each function a printable name.")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(f"the parameters of {name!r} are not a JSON schema", 'give {"type": "object", ...}.')
    if schema is not None and not _allows_object(schema.get("type", "object")):
        raise RequestError(
            f"the parameters of {name!r} are of type {str(schema['type'])[:80]}, but arguments are an object",
            'give {"type": "object", ...}.',
        )
    return Tool(name, schema)


def _allows_object(kind: object) -> bool:
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def choose_tools(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> list[Tool]:
    """Return the tools that a `tool_choice` allows: all for "required", or one that is named in OpenAI's form.

    Raises RequestError for a choice that names none of them.
    """
    if not tools:
        raise RequestError(f"tool_choice={choice!r} needs tools", 'give tools, or tool_choice="none".')
    if choice == "required":
        return list(tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice={str(choice)[:80]!r} does not name a function",
            'use "required", or {"type": "function", "function": {"name": ...}}.',
        )
    if found := [tool for tool in tools if tool.name == name]:
        return found[:1]
    raise RequestError(
        f"tool_choice names {name!r}, which is not among the tools", suggest(name, {t.name for t in tools})
    )


def parameters(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which are always an object."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def check_word(tool: Tool) -> None:
    """Raise RequestError for a name that is not one word, in a format that writes names without quotes."""
    if not WORD.issuperset(tool.name):
        raise RequestError(
            f"this model can't call a function with the name {tool.name[:80]!r}",
            "use only English letters, digits, '_', '-' and '.' in its name.",
        )


def object_shape(
    tool: Tool,
    marker: str,
    before: str = "",
    after: str = "",
    key: str = "arguments",
    tags: tuple[str, ...] = (),
    around: tuple[str, str] = ("", ""),
) -> CallShape:
    """Return the shape of a call `{"name": ..., key: {...}}` between two texts."""
    name = json.dumps(tool.name, ensure_ascii=False)
    return CallShape(marker, f'{before}{{"name": {name}, "{key}": ', parameters(tool), "}" + after, tags, around)


def call_grammar(
    shapes: Iterable[CallShape],
    token_id: TokenId,
    separator: str | None = None,
    compact: bool = False,
    instead: str | None = None,
    thought: str = "",
) -> str:
    """Return a grammar, in llguidance's dialect of Lark, for calls that each have one of these shapes.

    token_id: returns the id of a marker or tag that is one added token, and can only be written as this token;
    otherwise None. separator: the text between two calls; None = there is one call. compact: arguments have no white
    space between their parts. instead: symbols that the text may have in place of calls, such as `json_symbol`.
    thought: symbols that may precede all others.
    """
    forms = {f"call_{i}": shape for i, shape in enumerate(shapes)}
    before, after = _around(next(iter(forms.values())), token_id) if forms else ("", "")
    more = "" if separator is None else f"({quoted(separator)} call)*"
    rules = {
        "start": "thought? answer" if thought else "answer",
        "thought": thought,
        "answer": " | ".join(["calls"] * bool(forms) + ["instead"] * bool(instead)),
        "calls": f"{before} call {more} {after}" if forms else "",
        "call": " | ".join(forms),
        "instead": instead or "",
    }
    for name, shape in forms.items():
        rules |= _call_rules(name, shape, token_id, compact)
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items() if rule)


def _around(shape: CallShape, token_id: TokenId) -> list[str]:
    return [" ".join(literals(text, (shape.marker, *shape.tags), token_id)) for text in shape.around]


def _call_rules(name: str, shape: CallShape, token_id: TokenId, compact: bool) -> Rules:
    tags, arguments = (shape.marker, *shape.tags), f"{name}_arguments"
    before, after = literals(shape.marker + shape.prefix, tags, token_id), literals(shape.suffix, tags, token_id)
    write = shape.write or _json_rules
    return {name: " ".join([*before, arguments, *after]), **write(arguments, shape.schema, token_id, compact)}


def _json_rules(name: str, schema: Mapping[str, Any], token_id: TokenId, compact: bool) -> Rules:
    return {name: json_symbol(schema, compact)}


def json_symbol(schema: Mapping[str, Any], compact: bool) -> str:
    """Return the symbol of a grammar for JSON that fits a schema. compact: it has no white space between its parts."""
    options = {"whitespace_flexible": not compact}  # overrides the options of the schema itself
    return f"%json {json.dumps({**with_written_bounds(schema), 'x-guidance': options})}"


def form_symbol(source: GrammarSource) -> str | None:
    """Return the symbol of a form in a grammar; None for a grammar, whose rules may have the same names."""
    if source.kind == "json":
        schema = json.loads(source.text)
        return json_symbol(schema, source.compact) if isinstance(schema, dict) else None
    if source.kind == "choice":
        return "(" + " | ".join(map(json.dumps, json.loads(source.text))) + ")"
    if source.kind == "regex":
        quoted = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], source.text, flags=re.DOTALL)
        return "/(?:" + quoted.replace("\n", r"\n") + ")/"
    return None


def literals(text: str, tags: Iterable[str], token_id: TokenId) -> list[str]:
    """Return a text as symbols of a grammar: tags as token ids, the rest as strings."""
    tokens = {tag: token for tag in tags if tag and (token := token_id(tag)) is not None}
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    return [f"<[{tokens[piece]}]>" if piece in tokens else quoted(piece) for piece in pieces if piece]


def quoted(text: str) -> str:
    """Return a text as a symbol of a grammar; "" for an empty text."""
    return json.dumps(text) if text else ""


SPACE = " \t\r\n"


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer outside calls."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True)
class ToolDelta:
    """A piece of a call: `id` and `name` come with its first piece; the joined `arguments` are a JSON object."""

    index: int  # of the call, from 0
    id: str | None
    name: str | None
    arguments: str


Delta = TextDelta | ReasoningDelta | ToolDelta


def random_id() -> str:
    """Return an id in OpenAI's form."""
    return "call_" + _random_letters(24)


def short_id() -> str:
    """Return an id of nine letters and digits, which Mistral's templates require."""
    return _random_letters(9)


def _random_letters(count: int) -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(count))


class Deltas:
    """The output that was not fetched yet. White space next to a call is left out."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._made: list[Delta] = []
        self._space: list[str] = []  # at the end of the text so far
        self._num_calls = 0
        self.num_open = 0  # calls whose arguments have not ended
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
        self.num_open += 1

    def arguments(self, piece: str) -> None:
        """Add to the newest call's arguments."""
        self._made.append(ToolDelta(self._num_calls - 1, None, None, piece))

    def end_call(self) -> None:
        """End the newest call's arguments."""
        self.num_open -= 1

    def skip_space(self) -> None:
        """Leave out white space at the end of the text so far."""
        self._space.clear()

    def plain(self, piece: str) -> None:
        """Add text whose white space is kept, wherever it is."""
        self._made.append(TextDelta(piece))

    def reasoning(self, piece: str) -> None:
        """Add to the reasoning."""
        self.end()
        self._made.append(ReasoningDelta(piece))

    def end(self) -> None:
        """Release white space at the end of the text, unless a call precedes it."""
        if not self.after_call:
            self._made += map(TextDelta, self._space)
        self._space.clear()

    def fetch(self) -> list[Delta]:
        """Return the deltas since the last call; adjacent ones of the same kind are joined."""
        made, self._made = self._made, []
        groups = groupby(made, lambda delta: delta.index if isinstance(delta, ToolDelta) else type(delta))
        joined = (_join(list(group)) for _, group in groups)
        return [delta for delta in joined if delta != TextDelta("")]


def _join(group: Sequence[Delta]) -> Delta:
    first = group[0]
    if not isinstance(first, ToolDelta):
        return type(first)("".join(delta.text for delta in group if not isinstance(delta, ToolDelta)))
    pieces = "".join(delta.arguments for delta in group if isinstance(delta, ToolDelta))
    return ToolDelta(first.index, first.id, first.name, pieces)


class StreamParser(ABC):
    """Reads a text while it is generated. Time is linear in the text, and the result does not depend on its pieces."""

    def __init__(self, new_id: Callable[[], str] = random_id) -> None:
        """new_id: makes the calls' ids."""
        self._deltas, self._cursor = Deltas(new_id), Cursor()
        self._script = self._read()
        next(self._script)

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are now final. Only a possible beginning of a marker is held back."""
        for char in text:
            self._script.send(char)
        return self._deltas.fetch()

    def finish(self) -> list[Delta]:
        """Return the rest at the text's end; no `feed` may follow."""
        with suppress(StopIteration):
            self._script.send("")
        self._deltas.end()
        return self._deltas.fetch()

    @abstractmethod
    def _read(self) -> Script:
        """Read the text; the first character is sent first."""


class ToolParser(StreamParser):
    """Separates calls from text while both are generated. A format is a subclass, `Parser` in its module.

    marker: begins a call, or several; "" = no marker. closing: may follow a call, and is left out. signs: texts that
    all of the format's chat templates have. tags: other texts that may be special tokens, and are needed. between: the
    text between two calls of `shape`; None = it has room for one. reads_all: the format also separates reasoning, with
    and without tools. example_id: an id of a call as the format's templates expect it.
    """

    marker: ClassVar[str]
    closing: ClassVar[str | None] = None
    signs: ClassVar[tuple[str, ...]] = ()
    tags: ClassVar[tuple[str, ...]] = ()
    between: ClassVar[str | None] = None
    example_id: ClassVar[str] = "abcdefghi"
    reads_all: ClassVar[bool] = False
    reasons = False  # whether the text so far ends within reasoning
    default_id: ClassVar[Callable[[], str]] = staticmethod(random_id)

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        """new_id: makes the calls' ids; None = random ones."""
        self._tools: Mapping[str, Tool] = {}
        super().__init__(new_id or type(self).default_id)

    @property
    def is_cut(self) -> bool:
        """Whether a call's arguments have not ended."""
        return self._deltas.num_open > 0

    def after(self, prompt: str, tools: Sequence[Tool]) -> Self:
        """Return this parser, ready for the answer to a prompt. tools: those that it may call."""
        self._tools = {tool.name: tool for tool in tools}
        return self

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Return texts that the parser needs; if they are special tokens, decoding must keep them."""
        return tuple(filter(None, (cls.marker, cls.closing, *cls.tags)))

    @classmethod
    def opening(cls, token_id: TokenId) -> str:
        """Return the symbols of a grammar that precede an answer of a given form; see `call_grammar`."""
        return ""

    @classmethod
    def thought(cls, token_id: TokenId) -> str:
        """Return the symbols of a grammar for reasoning, which may precede calls and forms; "" = it has none."""
        return ""

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template may be written for this format."""
        return bool(cls.signs) and all(sign in template for sign in cls.signs)

    @classmethod
    @abstractmethod
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        """Return the form of one call of a tool."""

    @classmethod
    def separator(cls, template: str | None = None) -> str | None:
        """Return the text between two calls of `shape`; None if several calls can't be written in that shape."""
        return cls.between

    @abstractmethod
    def _calls(self) -> Script:
        """Read the calls that follow a marker. Raises MalformedError; then the content of `_cursor.raw` is text."""

    @override
    def _read(self) -> Script:
        cursor = self._cursor
        cursor.char = yield
        yield from self._begin()
        while found := (yield from search(cursor, self.markers(), self._deltas.text)):
            cursor.raw[:] = found
            cursor.char = yield
            if found == self.marker:
                yield from self._attempt()
            elif self._deltas.after_call:
                self._deltas.skip_space()
                cursor.raw.clear()
            self._release()

    def _begin(self) -> Script:
        """Read calls that may only be at the beginning of the text."""
        yield from ()

    def _attempt(self) -> Script:
        with suppress(MalformedError):
            yield from self._calls()

    def _release(self) -> None:
        """Output the characters that are not part of a call as text."""
        self._deltas.text("".join(self._cursor.raw))
        self._cursor.raw.clear()

    def _call_section(self, before: str, call: Callable[[], Script]) -> Script:
        """Read one call or more, each after a text, up to the closing."""
        cursor, found = self._cursor, before
        yield from skip_space(cursor)
        yield from require(cursor, before)
        while found == before:
            yield from call()
            yield from skip_space(cursor)
            found = yield from read_one(cursor, (before, self.closing or ""))
        cursor.raw.clear()

    def _call_list(self) -> Script:
        """Read one call or more between brackets, with commas."""
        cursor, before = self._cursor, "["
        yield from skip_space(cursor)
        yield from require(cursor, before)
        while before != "]":
            yield from skip_space(cursor)
            yield from self._listed_call()
            yield from skip_space(cursor)
            before = yield from read_one(cursor, (",", "]"))
        cursor.raw.clear()

    def _listed_call(self) -> Script:
        yield from self._call_object()

    def _call_object(self) -> Script:
        """Read `{"name": ..., "arguments": {...}}`, with keys in any order; "parameters" is another name for arguments.

        Only the keys id and type may be added. Raises MalformedError at the first character that does not fit.
        """
        cursor, name, held, keys = self._cursor, "", list[str](), set[str]()
        yield from require(cursor, "{")
        while True:
            keys.add(key := (yield from self._new_key(keys)))
            if key == "name":
                name = checked_name((yield from read_text(cursor)))
                if held:
                    self._begin_call(name)
                    self._add_arguments("".join(held))
                    self._deltas.end_call()
            elif key == "arguments" and name:
                yield from self._call_json(name)
            elif key == "arguments":
                yield from read_object(cursor, held.append)
            else:
                yield from read_value(cursor, drop)
            yield from skip_space(cursor)
            if cursor.char != ",":
                break
            yield from take(cursor, drop)
        yield from require(cursor, "}")
        if not keys >= {"name", "arguments"}:
            raise MalformedError
        cursor.raw.clear()

    def _new_key(self, known: Collection[str]) -> Generator[None, str, str]:
        """Read a key that is not known yet, and the colon after it."""
        cursor = self._cursor
        yield from skip_space(cursor)
        key = _KEYS.get((yield from read_text(cursor)), "")
        if not key or key in known:
            raise MalformedError
        yield from skip_space(cursor)
        yield from require(cursor, ":")
        yield from skip_space(cursor)
        return key

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._deltas.begin_call(name, call_id)
        self._cursor.raw.clear()

    def _add_arguments(self, piece: str) -> None:
        self._deltas.arguments(piece)
        self._cursor.raw.clear()

    def _call_json(self, name: str, call_id: str | None = None, syntax: Syntax | None = None) -> Script:
        """Read a call's arguments, which follow its name as an object."""
        yield from skip_space(self._cursor)
        if self._cursor.char != "{":
            raise MalformedError
        self._begin_call(name, call_id)
        yield from read_value(self._cursor, self._add_arguments, syntax)
        self._deltas.end_call()


def checked_name(text: str) -> str:
    """Return a function's name. Raises MalformedError if it is empty or has control characters."""
    if not text or not text.isprintable():
        raise MalformedError
    return text


def parse(parser: ToolParser, pieces: Iterable[str]) -> list[Delta]:
    """Return all deltas of a text."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.finish()]


Script = Generator[None, str, None]
Emit = Callable[[str], None]

_DIGITS = frozenset("0123456789")
HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_LITERALS = {"t": ("true", "true"), "f": ("false", "false"), "n": ("null", "null")}
_CONTROLS = {chr(i): json.dumps(chr(i))[1:-1] for i in range(32)}
_ESCAPED = {**_CONTROLS, '"': '\\"', "\\": "\\\\"}
_CLOSERS = {"{": "}", "[": "]"}
_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}


class MalformedError(Exception):
    """The text is not a call of the format."""


@dataclass(frozen=True)
class Syntax:
    """How values are written that are passed on as JSON, besides numbers, lists and objects, which are JSON's.

    quotes: the characters that begin a string. string, key: read one, from its first character. literals: each other
    value, by its first character, and the same in JSON with as many characters.
    """

    quotes: str
    string: Callable[[Cursor, Emit], Script]
    key: Callable[[Cursor, Emit], Script]
    literals: Mapping[str, tuple[str, str]]


class Cursor:
    """The next character ("" at the end of the text), and in `raw` the characters read but not yet output."""

    def __init__(self) -> None:
        self.char = ""
        self.raw: list[str] = []


def search(cursor: Cursor, tags: Sequence[str], emit: Emit) -> Generator[None, str, str]:
    """Pass text on up to one of these tags, and return the tag before its last character is passed; "" at the end."""
    held = ""
    while cursor.char:
        held += cursor.char
        while held and not any(tag.startswith(held) for tag in tags):
            emit(held[0])
            held = held[1:]
        if held in tags:
            return held
        cursor.char = yield
    for char in held:
        emit(char)
    return ""


def take(cursor: Cursor, emit: Emit, instead: str | None = None) -> Script:
    """Read any character and pass it on, or `instead` if given."""
    if not cursor.char:
        raise MalformedError
    cursor.raw.append(cursor.char)
    emit(instead or cursor.char)
    cursor.char = yield


def read_one(cursor: Cursor, texts: Sequence[str]) -> Generator[None, str, str]:
    """Read one of these texts, of which none begins another, and return it."""
    found = ""
    while found not in texts:
        found += cursor.char
        if not cursor.char or not any(text.startswith(found) for text in texts):
            raise MalformedError
        yield from take(cursor, drop)
    return found


def read_word(cursor: Cursor, allowed: Collection[str] = WORD) -> Generator[None, str, str]:
    """Read a name without quotes, of the characters that are allowed."""
    letters: list[str] = []
    while cursor.char in allowed:
        yield from take(cursor, letters.append)
    if not letters:
        raise MalformedError
    return "".join(letters)


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
    while cursor.char and cursor.char in SPACE:
        yield from take(cursor, emit)


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


def read_value(cursor: Cursor, emit: Emit, syntax: Syntax | None = None) -> Script:
    """Read a value without recursion: it may be nested to any depth. syntax: None = JSON's."""
    closers, syntax = list[str](), syntax or JSON
    while True:
        yield from skip_space(cursor, emit)
        if cursor.char in _CLOSERS:
            closers.append(_CLOSERS[cursor.char])
            yield from take(cursor, emit)
            yield from skip_space(cursor, emit)
            if cursor.char != closers[-1]:
                yield from _key(cursor, emit, closers[-1], syntax)
                continue
        else:
            yield from _scalar(cursor, emit, syntax)
        if not (yield from _close(cursor, emit, closers)):
            return
        yield from _key(cursor, emit, closers[-1], syntax)


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


def _key(cursor: Cursor, emit: Emit, closer: str, syntax: Syntax) -> Script:
    """Read a key and its colon, in an object."""
    if closer == "}":
        yield from skip_space(cursor, emit)
        yield from syntax.key(cursor, emit)
        yield from skip_space(cursor, emit)
        yield from require(cursor, ":", emit)


def _scalar(cursor: Cursor, emit: Emit, syntax: Syntax) -> Script:
    if cursor.char and cursor.char in syntax.quotes:
        yield from syntax.string(cursor, emit)
    elif cursor.char in syntax.literals:
        for own, instead in zip(*syntax.literals[cursor.char], strict=True):
            if cursor.char != own:
                raise MalformedError
            yield from take(cursor, emit, instead)
    else:
        yield from _number(cursor, emit)


def _string(cursor: Cursor, emit: Emit) -> Script:
    yield from require(cursor, '"', emit)
    while cursor.char != '"':
        if cursor.char == "\\":
            yield from take(cursor, emit)
            yield from _escaped(cursor, emit)
        else:
            yield from take(cursor, emit, instead=_CONTROLS.get(cursor.char))
    yield from take(cursor, emit)


def escaped(text: str) -> str:
    """Return a text as it is written within a JSON string."""
    return "".join(_ESCAPED.get(char, char) for char in text)


def _escaped(cursor: Cursor, emit: Emit) -> Script:
    if cursor.char in _ESCAPES:
        yield from take(cursor, emit)
        return
    yield from require(cursor, "u", emit)
    for _ in range(4):
        yield from one_of(cursor, emit, HEX)


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
    yield from one_of(cursor, emit, _DIGITS)
    while cursor.char in _DIGITS:
        yield from take(cursor, emit)


def one_of(cursor: Cursor, emit: Emit, allowed: frozenset[str]) -> Script:
    """Read one of these characters."""
    if cursor.char not in allowed:
        raise MalformedError
    yield from take(cursor, emit)


JSON = Syntax('"', _string, _string, _LITERALS)
