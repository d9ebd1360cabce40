"""The answer of /v1/responses: reasoning if there is any, a message of plain text, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculant.engine.generation import StreamPiece
from speculant.serving.answers import Answer, Call, Chunk, new_id
from speculant.serving.messages import MessagePart, MessageReader
from speculant.serving.prompts import Prompt
from speculant.serving.protocol import ResponseBody
from speculant.serving.token_texts import chat_logprob


@dataclass
class _Item:
    """One item of the output while it is generated: `kind` is "reasoning" or "message"."""

    kind: str
    id: str
    place: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def event(self, ending: str) -> str:
        """Return the type of an event about the item's text."""
        return f"response.{'reasoning' if self.kind == 'reasoning' else 'output'}_text.{ending}"

    def part(self, text: str) -> dict[str, Any]:
        """Return the item's only part, with a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self.logprobs]}

    def shown(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item."""
        rest: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"id": self.id, "type": self.kind, "status": status, **rest, "content": content}


class ResponseAnswer(Answer):
    """A response in OpenAI's newer shape. Its chunks are events; each has a type and a number."""

    def __init__(self, call: Call, body: ResponseBody, make_reader: Callable[[Prompt], MessageReader]) -> None:
        super().__init__(call, 1)
        self._body, self._id, self._make_reader = body, new_id("resp_"), make_reader
        self._reader = MessageReader()
        self._items: list[_Item] = []
        self._unsent: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not arrived yet
        self._reason: str | None = None
        self._number = -1

    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        """See `Answer.begin`."""
        self._reader = self._make_reader(prompts[0])
        return [
            self._event(f"response.{kind}", response=self._response("in_progress", []))
            for kind in ("created", "in_progress")
        ]

    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """See `Answer.read`."""
        thought = self._reader.reasoning_tokens
        part = self._reader.feed(piece.text, piece.token)
        reasons = self._reader.reasoning_tokens > thought
        if piece.token is not None and piece.logprobs is not None and not reasons:
            top = self.call.params.logprobs or 0
            self._unsent.append(chat_logprob(self.call.texts, piece.token, piece.logprobs, top))
        self._reason = piece.finish_reason
        events = self._shown(part, self.tokens_of(piece), "reasoning" if reasons else "message")
        return events + (self._shown(self._reader.finish(), {}, "") if piece.finish_reason is not None else [])

    def end(self) -> list[Chunk]:
        """See `Answer.end`."""
        last = "response.incomplete" if self._status == "incomplete" else "response.completed"
        opened = [] if self._items else self._open("message")
        return [*opened, *self._close(self._status), self._event(last, response=self.document())]

    def document(self) -> dict[str, Any]:
        """See `Answer.document`."""
        if not self._items:
            self._open("message")
        used = self.usage(self._reader.reasoning_tokens)
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": used["total_tokens"],
        }
        self._items[-1].logprobs += self._fetch_logprobs(self._items[-1].kind)
        finished = {"completed_at": int(time.time()), "usage": usage, **self.speculation()}
        *before, last = self._items
        output = [item.shown("completed", [item.part(item.text)]) for item in before]
        return self._response(self._status, [*output, last.shown(self._status, [last.part(last.text)])]) | finished

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _shown(self, part: MessagePart, tokens: dict[str, Any], kind: str) -> list[Chunk]:
        """Return the events of a part. kind: the item of its token, "" = none."""
        events = self._delta("reasoning", part.reasoning, {}) if part.reasoning else []
        events += self._delta("message", part.content, {}) if part.content else []
        if not tokens:
            return events
        if events:
            return [*events[:-1], {**events[-1], **tokens}]
        return self._delta(self._items[-1].kind if self._items else kind, "", tokens)

    def _delta(self, kind: str, text: str, tokens: dict[str, Any]) -> list[Chunk]:
        opened = [] if self._items and self._items[-1].kind == kind else [*self._close("completed"), *self._open(kind)]
        item = self._items[-1]
        item.text += text
        logprobs = self._fetch_logprobs(kind)
        item.logprobs += logprobs
        rest = {} if kind == "reasoning" else {"logprobs": logprobs}
        return [*opened, self._event(item.event("delta"), **_place(item), delta=text, **rest, **tokens)]

    def _fetch_logprobs(self, kind: str) -> list[dict[str, Any]]:
        """Return the unsent log-probabilities, if the item is the message."""
        if kind == "reasoning":
            return []
        unsent, self._unsent = self._unsent, []
        return unsent

    def _open(self, kind: str) -> list[Chunk]:
        item = _Item(kind, new_id("rs_" if kind == "reasoning" else "msg_"), len(self._items))
        self._items.append(item)
        added = item.shown("in_progress", [])
        return [
            self._event("response.output_item.added", output_index=item.place, item=added),
            self._event("response.content_part.added", **_place(item), part=item.part("")),
        ]

    def _close(self, status: str) -> list[Chunk]:
        """Return the last events of the newest item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        item.logprobs += self._fetch_logprobs(item.kind)
        part = item.part(item.text)
        rest = {} if item.kind == "reasoning" else {"logprobs": item.logprobs}
        return [
            self._event(item.event("done"), **_place(item), text=item.text, **rest),
            self._event("response.content_part.done", **_place(item), part=part),
            self._event("response.output_item.done", output_index=item.place, item=item.shown(status, [part])),
        ]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self.call.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
            "model": self.call.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
        }

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **values}


def _place(item: _Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.place, "content_index": 0}
