"""Splits an assistant's message into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from speculant.engine import RenderedPrompt
from speculant.params import SamplingParams
from speculant.serving.tools.base import (
    SPACE,
    Delta,
    MalformedError,
    ReasoningDelta,
    Script,
    StreamParser,
    TextDelta,
    ToolDelta,
    ToolParser,
    require,
    search,
    skip_space,
)
from speculant.structured import Reasoning
from speculant.text import Tokenizer


@dataclass
class MessagePart:
    """The parts that some text adds to a message. deltas: the same in the order of the text; empty for a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolDelta] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    def as_delta(self) -> dict[str, Any]:
        """Return the part as a streamed `delta`; empty if it adds nothing."""
        delta: dict[str, Any] = {}
        if self.content:
            delta["content"] = self.content
        if self.reasoning:
            delta["reasoning_content"] = self.reasoning
        if self.calls:
            delta["tool_calls"] = [_streamed(call) for call in self.calls]
        return delta


class MessageReader:
    """Reads one answer. Without parsers all of it is content. message: everything so far."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, calls_alone: bool = False
    ) -> None:
        """tools: may also read reasoning, if there is no other parser for it.

        calls_alone: the answer has the form of calls, so other text is a call that was cut before its arguments. It is
        left out.
        """
        self.message = MessagePart()
        self.reasoning_tokens = 0
        self._reasoning, self._tools, self._calls_alone = reasoning, tools, calls_alone

    def feed(self, text: str, token: int | None = None) -> MessagePart:
        """Take one more token with its text; return the deltas that are now final."""
        before = self._within
        part = self._sort([TextDelta(text)] if self._reasoning is None else self._reasoning.feed(text, token))
        self.reasoning_tokens += before or self._within
        return part

    @property
    def _within(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return bool(self._reasoning and self._reasoning.within) or bool(self._tools and self._tools.reasons)

    @property
    def is_cut(self) -> bool:
        """Whether a call's arguments are incomplete."""
        return self._tools is not None and self._tools.is_cut

    def finish(self) -> MessagePart:
        """Return the rest, at the end of the text."""
        part = self._sort(self._reasoning.finish() if self._reasoning else [])
        if self._tools is not None:
            self._add(part, self._tools.finish())
        return part

    def _sort(self, deltas: Sequence[Delta]) -> MessagePart:
        part = MessagePart()
        for delta in deltas:
            self._add(part, self._tools.feed(delta.text) if self._tools and isinstance(delta, TextDelta) else [delta])
        return part

    def _add(self, part: MessagePart, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if self._calls_alone and isinstance(delta, TextDelta):
                continue
            part.deltas.append(delta)
            for each in (part, self.message):
                if isinstance(delta, ToolDelta):
                    each.calls.append(delta)
                elif isinstance(delta, ReasoningDelta):
                    each.reasoning += delta.text
                else:
                    each.content += delta.text


def joined_calls(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    """Join the pieces of calls to whole calls."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


def _streamed(delta: ToolDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


class ReasoningParser(StreamParser):
    """Splits an answer into reasoning and the rest. Reasoning can only be at the beginning.

    White space next to the tags is left out.
    """

    def __init__(
        self, start: str = "<think>", end: str = "</think>", opened: bool = False, tokens: Reasoning | None = None
    ) -> None:
        """opened: the prompt ends with the start tag, so the answer begins within the reasoning.

        tokens: the tags that the form's constraint reads; the same text in other tokens is no tag. None = any tokens.
        """
        self.start, self.end, self._opened, self._tokens = start, end, opened, tokens
        self.within = opened  # whether the text so far ends within the reasoning
        self._may_open = self._may_end = tokens is None
        self._begun = False
        self._space: list[str] = []  # at the end of the reasoning so far
        super().__init__()

    @override
    def feed(self, text: str, token: int | None = None) -> list[Delta]:
        """token: the token of this text, which may include text of earlier ones. Needed only if `tokens` are given."""
        if self._tokens is not None:
            self._may_open |= not self._begun and token == self._tokens.start
            self._may_end |= token == self._tokens.end
            self._begun = True
        return super().feed(text)

    @override
    def _read(self) -> Script:
        cursor = self._cursor
        cursor.char = yield
        if self._opened or (self._may_open and (yield from self._opens())):
            self.within = True
            yield from skip_space(cursor)
            yield from self._reason()
            self.within = False
            yield from skip_space(cursor)
        while cursor.char:
            self._deltas.plain(cursor.char)
            cursor.char = yield

    def _opens(self) -> Generator[None, str, bool]:
        """Read the start tag; anything else is text."""
        with suppress(MalformedError):
            yield from skip_space(self._cursor)
            yield from require(self._cursor, self.start)
            return True
        self._deltas.plain("".join(self._cursor.raw))
        return False

    def _reason(self) -> Script:
        """Read the reasoning and the end tag."""
        while tag := (yield from search(self._cursor, (self.end,), self._reasoned)):
            self._cursor.char = yield
            if self._may_end:
                return
            for char in tag:
                self._reasoned(char)
        if self._space:
            self._deltas.reasoning("".join(self._space))

    def _reasoned(self, char: str) -> None:
        self._space.append(char)
        if char not in SPACE:
            self._deltas.reasoning("".join(self._space))
            self._space.clear()


def find_reasoning(rendered: RenderedPrompt | None, has_form: bool = False) -> ReasoningParser | None:
    """Return a parser for one answer to a prompt; None if all of it is content.

    has_form: the answer has a given form, whose constraint then defines where the reasoning is.
    """
    if rendered is None or rendered.expected is None or (has_form and rendered.reasoning is None):
        return None
    expected = rendered.expected
    return ReasoningParser(*expected.tags, opened=expected.opened, tokens=rendered.reasoning if has_form else None)


def with_tags(tokenizer: Tokenizer, params: SamplingParams, tags: Iterable[str]) -> SamplingParams:
    """Return settings that keep these texts in the answer, even if they are special tokens."""
    if all(tokenizer.backend.token_to_id(tag) not in tokenizer.special_ids for tag in tags):
        return params
    return dataclasses.replace(params, skip_special_tokens=False)
