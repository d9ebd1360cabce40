"""The answer of /v1/responses: one message of plain text, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from speculant.engine.generation import StreamPiece
from speculant.serving.answers import Answer, Call, Chunk, new_id
from speculant.serving.prompts import Prompt
from speculant.serving.protocol import ResponseBody


class ResponseAnswer(Answer):
    """A response in OpenAI's newer shape. Chunks are its events; each has its type and a number."""

    def __init__(self, call: Call, body: ResponseBody) -> None:
        super().__init__(call, 1)
        self._body, self._id, self._message = body, new_id("resp_"), new_id("msg_")
        self._pieces: list[str] = []
        self._reason: str | None = None
        self._number = -1

    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        """See `Answer.begin`."""
        empty = self._item("in_progress") | {"content": []}
        return [
            self._event("response.created", response=self._response("in_progress", [])),
            self._event("response.in_progress", response=self._response("in_progress", [])),
            self._event("response.output_item.added", output_index=0, item=empty),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """See `Answer.read`."""
        self._pieces.append(piece.text)
        self._reason = piece.finish_reason
        if not (piece.text or self.call.lists_tokens):
            return []
        rest = self.tokens_of(piece)
        return [self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[], **rest)]

    def end(self) -> list[Chunk]:
        """See `Answer.end`."""
        text = "".join(self._pieces)
        last = "response.incomplete" if self._status == "incomplete" else "response.completed"
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._item(self._status)),
            self._event(last, response=self.document()),
        ]

    def document(self) -> dict[str, Any]:
        """See `Answer.document`."""
        used = self.usage()
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        finished = {"completed_at": int(time.time()), "usage": usage, **self.speculation()}
        return self._response(self._status, [self._item(self._status)]) | finished

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

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
            "max_output_tokens": body.max_output_tokens,
            "model": self.call.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
        }

    def _item(self, status: str) -> dict[str, Any]:
        content = [_part("".join(self._pieces))]
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **values}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
