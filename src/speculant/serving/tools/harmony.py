"""Harmony, which gpt-oss writes: messages in channels, `<|channel|>final<|message|>...<|end|><|start|>assistant...`.

`analysis` is reasoning. `final`, and `commentary` without a recipient, are the content. A recipient is in the header of
a call: `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`, or `to=functions.f` precedes
the channel. The format is described at https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Self

from typing_extensions import override

from speculant.serving.tools.base import (
    CallShape,
    Emit,
    Script,
    TokenId,
    Tool,
    ToolParser,
    check_word,
    literals,
    parameters,
    search,
    skip_space,
)

_CHANNEL, _CONSTRAIN, _MESSAGE, _START = "<|channel|>", "<|constrain|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TAGS = (_CHANNEL, _CONSTRAIN, _MESSAGE, _START, *_ENDS)
_ANALYSIS = re.compile(rf"{re.escape(_CHANNEL)}\s*analysis\b")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


class HarmonyParser(ToolParser):
    """See the module. An answer begins within the header of a message, after `<|start|>assistant` in the prompt."""

    marker = _CHANNEL
    signs = (_CHANNEL, _MESSAGE, "<|call|>")
    reads_all = True

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self._allows_calls, self._has_tags = True, False
        self._function = ""  # that the newest message calls
        self._last: Emit | None = None  # where the newest text went
        super().__init__(new_id)

    @override
    def after(self, prompt: str, tools: Sequence[Tool]) -> Self:
        """A prompt may end within a message, which the answer continues."""
        self._allows_calls = bool(tools)
        header, found, text = prompt.rpartition(_START)[2].partition(_MESSAGE)
        if found and not any(end in text for end in _ENDS):
            self.feed(header + found)
        return self

    @classmethod
    @override
    def markers(cls) -> tuple[str, ...]:
        return _TAGS

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        """An end token follows the arguments: `<|call|>` is one."""
        check_word(tool)
        header = f"commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}"
        return CallShape(_CHANNEL, header, parameters(tool), "", _TAGS)

    @classmethod
    @override
    def opening(cls, token_id: TokenId) -> str:
        return " ".join(literals(f"{_CHANNEL}final{_MESSAGE}", _TAGS, token_id))

    @classmethod
    @override
    def thought(cls, token_id: TokenId) -> str:
        """Free text can only end at a tag that is one token."""
        if token_id(_ENDS[0]) is None:
            return ""
        before = literals(f"{_CHANNEL}analysis{_MESSAGE}", _TAGS, token_id)
        return " ".join([*before, r"/(.|\n)*/", *literals(f"{_ENDS[0]}{_START}assistant", _TAGS, token_id)])

    def _calls(self) -> Script:
        yield from skip_space(self._cursor)
        if self._cursor.char == "{":
            self._last = None
        yield from self._call_json(self._function)

    @override
    def _read(self) -> Script:
        self._cursor.char = yield
        while self._cursor.char:
            header = yield from self._header()
            yield from self._message(header)

    def _header(self) -> Generator[None, str, str]:
        """Read up to a message's text, and return its header. An answer without tags is content."""
        pieces: list[str] = []
        while self._cursor.char:
            tag = yield from self._until_tag(pieces.append)
            self._has_tags |= bool(tag)
            if tag == _MESSAGE:
                return "".join(pieces)
            if tag:
                pieces = [*pieces, tag] if tag in (_CHANNEL, _CONSTRAIN) else []
        if not self._has_tags:
            self._deltas.text("".join(pieces))
        return ""

    def _message(self, header: str) -> Script:
        """Read a message's text, and the tag after it."""
        function = _FUNCTION.search(header) if self._allows_calls else None
        if function:
            self._function = function[1]
            yield from self._attempt()
            self._cursor.raw.clear()
        self.reasons = bool(_ANALYSIS.search(header)) and not function
        yield from self._until_tag(self._beginning(self._deltas.reasoning if self.reasons else self._deltas.text))

    def _beginning(self, emit: Emit) -> Emit:
        """Return a function that passes a message's text on, on a new line after text at the same place."""
        begun = False

        def pass_on(piece: str) -> None:
            nonlocal begun
            if not begun and emit == self._last:
                emit("\n")
            begun, self._last = True, emit
            emit(piece)

        return pass_on

    def _until_tag(self, emit: Emit) -> Generator[None, str, str]:
        """Pass text on up to a tag, and return the tag; "" at the end of the text."""
        if tag := (yield from search(self._cursor, _TAGS, emit)):
            self.reasons = False
            self._cursor.char = yield
        return tag


Parser = HarmonyParser
