"""The answer of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculant.engine.generation import StreamPiece
from speculant.serving.answers import Answer, Call, Chunk, new_id
from speculant.serving.messages import MessageReader, joined_calls
from speculant.serving.prompts import Prompt
from speculant.serving.token_texts import chat_logprob, prompt_logprobs


@dataclass
class _ChatChoice:
    reader: MessageReader
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatAnswer(Answer):
    """One choice for each sample. Its reader separates reasoning, content and tool calls."""

    def __init__(
        self, call: Call, make_reader: Callable[[Prompt], MessageReader], calls_reason: str = "tool_calls"
    ) -> None:
        """calls_reason: `finish_reason` after calls."""
        super().__init__(call, 1)
        self._id, self._make_reader, self._calls_reason = new_id("chatcmpl-"), make_reader, calls_reason
        self._choices: list[_ChatChoice] = []

    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        """See `Answer.begin`."""
        self._choices = [_ChatChoice(self._make_reader(prompts[0])) for _ in range(self.call.params.n)]
        first = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": list(prompts[0].tokens)} if self.call.returns_ids else {}
        return [self._chunk([_shown(index, first)], **ids) for index in range(self.call.params.n)]

    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """See `Answer.read`."""
        choice = self._choices[index]
        part = choice.reader.feed(piece.text, piece.token)
        chunks = [self._shown_piece(index, piece, part.as_delta())]
        if piece.finish_reason is not None:
            rest = choice.reader.finish().as_delta()
            chunks += [self._chunk([_shown(index, rest)])] if rest else []
            choice.finish_reason = self._reason(choice, piece.finish_reason)
            if choice.finish_reason is not None:
                last = _shown(index, {}, None, choice.finish_reason) | {"stop_reason": piece.stop_reason}
                chunks.append(self._chunk([last], **self.last_speculation(piece)))
        return [chunk for chunk in chunks if chunk is not None]

    def end(self) -> list[Chunk]:
        """See `Answer.end`."""
        if not self.call.include_usage:
            return []
        return [self._chunk([], **self.speculation()) | {"usage": self._usage()}]

    def document(self) -> dict[str, Any]:
        """See `Answer.document`."""
        choices = [self._document(index, choice) for index, choice in enumerate(self._choices)]
        value = self._named("chat.completion") | {"choices": choices, "usage": self._usage(), **self.speculation()}
        if self.call.returns_ids:
            value["prompt_token_ids"] = list(self.results[0].prompt_token_ids)
        if self.results[0].prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(self.results[0].prompt_logprobs)
        return value

    def _shown_piece(self, index: int, piece: StreamPiece, delta: dict[str, Any]) -> Chunk | None:
        choice, logprobs = self._choices[index], None
        if piece.token is not None and piece.logprobs is not None:
            top = self.call.params.logprobs or 0
            entry = chat_logprob(self.call.texts, piece.token, piece.logprobs, top)
            choice.logprobs.append(entry)
            logprobs = {"content": [entry], "refusal": None}
        ids = self.ids_of(piece)
        if not (delta or logprobs or ids or self.call.lists_tokens):
            return None
        return self._chunk([_shown(index, delta, logprobs) | ids], **self.tokens_of(piece))

    def _document(self, index: int, choice: _ChatChoice) -> dict[str, Any]:
        read = choice.reader.message
        message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message |= {"content": read.content or None, "tool_calls": joined_calls(read.calls)}
        logprobs = None if self.call.params.logprobs is None else {"content": choice.logprobs, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": self.results[0].outputs[index].stop_reason,
            **self.ids_of_output(self.results[0].outputs[index]),
        }

    def _reason(self, choice: _ChatChoice, reason: str) -> str | None:
        if reason == "error":
            return None
        called = choice.reader.message.calls and not choice.reader.is_cut
        return self._calls_reason if called and reason == "stop" else reason

    def _usage(self) -> dict[str, Any]:
        return self.usage(sum(choice.reader.reasoning_tokens for choice in self._choices))

    def _chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        return {**self._named("chat.completion.chunk"), "choices": choices, **self.chunk_usage(), **rest}

    def _named(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self.call.created, "model": self.call.model}


def _shown(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
