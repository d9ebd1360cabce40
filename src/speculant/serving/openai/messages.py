"""Splits an assistant's message into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from speculant.engine import RenderedPrompt
from speculant.params import SamplingParams
from speculant.serving.tools import ReasoningDelta, TextDelta, ToolDelta, ToolParser
from speculant.serving.tools.base import SPACE
from speculant.structured import Reasoning
from speculant.text import Tokenizer


@dataclass
class MessagePart:
    """The parts that some text adds to a message. deltas: the same in the order of the text; empty for a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolDelta] = field(default_factory=list)
    deltas: list[ReasoningDelta | TextDelta | ToolDelta] = field(default_factory=list)

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

    def _sort(self, deltas: Sequence[ReasoningDelta | TextDelta]) -> MessagePart:
        part = MessagePart()
        for delta in deltas:
            is_text = isinstance(delta, TextDelta)
            self._add(part, self._tools.feed(delta.text) if self._tools and is_text else [delta])
        return part

    def _add(self, part: MessagePart, deltas: Sequence[ReasoningDelta | TextDelta | ToolDelta]) -> None:
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


_SPACE = frozenset(SPACE)


Delta = ReasoningDelta | TextDelta


class ReasoningParser:
    """Splits an answer into reasoning and the rest. Reasoning can only be at the beginning.

    White space next to the tags is left out. Time is linear in the text, and the result does not depend on its pieces.
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
        self._made: list[Delta] = []
        self._char = ""  # to be read next; "" = the end of the text
        self._script = self._read()
        next(self._script)

    def feed(self, text: str, token: int | None = None) -> list[Delta]:
        """Take more text; return the deltas that are now final. Only a possible beginning of a tag is held back.

        token: the token of this text, which may include text of earlier ones. Needed only if `tokens` are given.
        """
        if self._tokens is not None:
            self._may_open |= not self._begun and token == self._tokens.start
            self._may_end |= token == self._tokens.end
            self._begun = True
        for char in text:
            self._script.send(char)
        return self._fetch()

    def finish(self) -> list[Delta]:
        """Return the rest at the text's end; no `feed` may follow. Reasoning without an end tag stays reasoning."""
        with suppress(StopIteration):
            self._script.send("")
        return self._fetch()

    def _fetch(self) -> list[Delta]:
        made, self._made = self._made, []
        return [kind("".join(each.text for each in group)) for kind, group in groupby(made, type)]

    def _read(self) -> Generator[None, str, None]:
        self._char = yield
        if self._opened or (self._may_open and (yield from self._opens())):
            self.within = True
            yield from self._skip_space()
            yield from self._reason()
            self.within = False
            yield from self._skip_space()
        while self._char:
            self._made.append(TextDelta(self._char))
            self._char = yield

    def _opens(self) -> Generator[None, str, bool]:
        """Read the start tag; anything else is text."""
        held = yield from self._skip_space()
        for expected in self.start:
            if self._char != expected:
                self._made += [TextDelta(held)] if held else []
                return False
            held += expected
            self._char = yield
        return True

    def _skip_space(self) -> Generator[None, str, str]:
        skipped: list[str] = []
        while self._char in _SPACE:
            skipped.append(self._char)
            self._char = yield
        return "".join(skipped)

    def _reason(self) -> Generator[None, str, None]:
        """Read the reasoning and the end tag."""
        space: list[str] = []
        held = ""  # the beginning of an end tag, perhaps
        while self._char:
            held += self._char
            while not self.end.startswith(held):
                space.append(held[0])
                if held[0] not in _SPACE:
                    self._release(space)
                held = held[1:]
            self._char = yield
            if held == self.end and self._may_end:
                return
        self._release([*space, held])

    def _release(self, pieces: list[str]) -> None:
        if text := "".join(pieces):
            self._made.append(ReasoningDelta(text))
        pieces.clear()


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
