"""Splits an assistant's message into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from speculant.serving.reasoning import ReasoningParser
from speculant.serving.tools import ReasoningDelta, TextDelta, ToolDelta, ToolParser


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
