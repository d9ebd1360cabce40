"""The answer of /v1/responses: items of reasoning, text and calls, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from speculant.engine import StreamPiece
from speculant.serving.answers import Answer, Call, Chunk, new_id
from speculant.serving.errors import ApiError
from speculant.serving.messages import MessagePart, MessageReader
from speculant.serving.prompts import Prompt
from speculant.serving.protocol import ResponseBody
from speculant.serving.responses.chat import shown_settings
from speculant.serving.responses.items import CALL_ID, MESSAGE_ID, REASONING_ID
from speculant.serving.token_texts import chat_logprob
from speculant.serving.tools import ReasoningDelta, TextDelta, ToolDelta

_TEXTS = MappingProxyType(  # in the names of events about an item's text
    {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
)
_IDS = MappingProxyType({"reasoning": REASONING_ID, "message": MESSAGE_ID, "function_call": CALL_ID})
_CODES = MappingProxyType({400: "invalid_prompt", 429: "rate_limit_exceeded"})  # of errors, by status


@dataclass
class _OutputItem:
    """One item of the output while it is generated. text: of a call, its arguments. call_id, name: of a call."""

    kind: str
    place: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        self.id = new_id(_IDS[self.kind])

    def event(self, ending: str) -> str:
        """Return the type of an event about the item's text."""
        return f"response.{_TEXTS[self.kind]}.{ending}"

    @property
    def where(self) -> dict[str, Any]:
        """The place of the item's text, for events."""
        place = {"item_id": self.id, "output_index": self.place}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """Return the only part of an item other than a call, with a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self.logprobs]}

    def shown(self, status: str, complete: bool = True) -> dict[str, Any]:
        """Return the item, without its text unless it is complete."""
        value: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**value, "call_id": self.call_id, "name": self.name, "arguments": self.text if complete else ""}
        rest: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {**value, **rest, "content": [self.part(self.text)] if complete else []}


class ResponseAnswer(Answer):
    """A response in OpenAI's newer shape. Its chunks are events; each has a type and a number."""

    def __init__(
        self, call: Call, body: ResponseBody, make_reader: Callable[[Prompt], MessageReader], stored: bool = False
    ) -> None:
        """stored: the response says that it is stored."""
        super().__init__(call, 1)
        self.id = new_id("resp_")
        self._body, self._make_reader, self._stored = body, make_reader, stored
        self._reader = MessageReader()
        self._items: list[_OutputItem] = []
        self._unsent: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not arrived yet
        self._tokens: list[dict[str, Any]] = []  # of `speculant_tokens`: tokens that no event has listed yet
        self._reason: str | None = None
        self._number = -1
        self._document: dict[str, Any] | None = None

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
        self._tokens += self.tokens_of(piece).get("speculant_tokens", ())
        events = self._shown(part, "reasoning" if reasons else "message")
        if piece.finish_reason is not None:
            events += self._shown(self._reader.finish(), "message")
        return events

    def end(self) -> list[Chunk]:
        """See `Answer.end`."""
        last = "response.incomplete" if self._status == "incomplete" else "response.completed"
        opened = [] if self._items else self._delta("message", "") if self._tokens else self._open("message")
        return [*opened, *self._close(self._status), self._event(last, response=self.document())]

    def document(self) -> dict[str, Any]:
        """See `Answer.document`."""
        if self._document is None:
            self._document = self._complete()
        return self._document

    def unfinished(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response without its output. status: queued, in_progress, cancelled, or failed with an error."""
        value = self._response(status, [])
        if error is not None:
            value["error"] = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        return value

    def _complete(self) -> dict[str, Any]:
        used = self.usage(self._reader.reasoning_tokens)
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": used["total_tokens"],
        }
        finished = {"completed_at": int(time.time()), "usage": usage, **self.speculation()}
        *before, last = self._items
        output = [*(item.shown("completed") for item in before), last.shown(self._status)]
        return self._response(self._status, output) | finished

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" or self._reader.is_cut else "completed"

    @property
    def _details(self) -> dict[str, Any]:
        """Why the response is incomplete. OpenAI has no reason for a call that a stop string cuts."""
        return {"reason": "max_output_tokens"} if self._reason == "length" else {}

    def _shown(self, part: MessagePart, kind: str) -> list[Chunk]:
        """Return the events of a part. kind: the item of its token, if the part is empty."""
        events = [event for delta in part.deltas for event in self._of(delta)]
        if not self._tokens:
            return events
        if events:
            return [*events[:-1], {**events[-1], **self._fetch_tokens()}]
        if not self._items and self._body.tools:
            return []  # the token may begin a call
        return self._delta(self._items[-1].kind if self._items else kind, "")

    def _of(self, delta: ReasoningDelta | TextDelta | ToolDelta) -> list[Chunk]:
        if not isinstance(delta, ToolDelta):
            return self._delta("reasoning" if isinstance(delta, ReasoningDelta) else "message", delta.text)
        self._unsent.clear()  # a call has no log-probabilities
        begun = []
        if delta.name is not None:
            begun = [*self._close("completed"), *self._open("function_call", delta.id or "", delta.name)]
        return [*begun, *self._delta("function_call", delta.arguments)] if delta.arguments else begun

    def _delta(self, kind: str, text: str) -> list[Chunk]:
        """Return the events of a text that belongs to an item of a kind: the newest item, or a new one."""
        opened: list[Chunk] = []
        if not self._items or self._items[-1].kind != kind:
            if self._items and self._items[-1].kind == "function_call":
                del self._unsent[:-1]  # tokens that ended the call
            opened = [*self._close("completed"), *self._open(kind)]
        item = self._items[-1]
        item.text += text
        rest = {}
        if kind == "message":
            rest["logprobs"] = self._fetch_logprobs()
            item.logprobs += rest["logprobs"]
        tokens = {} if text else self._fetch_tokens()
        return [*opened, self._event(item.event("delta"), **item.where, delta=text, **rest, **tokens)]

    def _fetch_tokens(self) -> dict[str, Any]:
        """Return the entry of the tokens that no event has listed yet."""
        tokens, self._tokens = self._tokens, []
        return {"speculant_tokens": tokens} if tokens else {}

    def _fetch_logprobs(self) -> list[dict[str, Any]]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _open(self, kind: str, call_id: str = "", name: str = "") -> list[Chunk]:
        item = _OutputItem(kind, len(self._items), call_id, name)
        self._items.append(item)
        added = item.shown("in_progress", complete=False)
        events: list[Chunk] = [self._event("response.output_item.added", output_index=item.place, item=added)]
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **item.where, part=item.part("")))
        return events

    def _close(self, status: str) -> list[Chunk]:
        """Return the last events of the newest item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        shown: dict[str, Any] = {"text": item.text}
        if item.kind == "message":
            item.logprobs += self._fetch_logprobs()
            shown["logprobs"] = item.logprobs
        elif item.kind == "function_call":
            shown = {"name": item.name, "arguments": item.text}
        events = [self._event(item.event("done"), **item.where, **shown)]
        if item.kind != "function_call":
            events.append(self._event("response.content_part.done", **item.where, part=item.part(item.text)))
        return [*events, self._event("response.output_item.done", output_index=item.place, item=item.shown(status))]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self.call.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": self._details if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.call.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": self._stored,
            "temperature": params.temperature,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            **shown_settings(body),
        }

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **values}
