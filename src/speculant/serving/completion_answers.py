"""The answer of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from speculant.engine.generation import StreamPiece
from speculant.serving.answers import Answer, Call, Chunk, new_id
from speculant.serving.token_texts import completion_logprobs, prompt_logprobs
from speculant.types import Logprobs


@dataclass
class _Choice:
    """One sample: its text so far, and for each token with log-probabilities where its text begins."""

    pieces: list[str] = field(default_factory=list)
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    entries: list[Logprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    """Choices in the order of the prompts, `n` for each."""

    def __init__(self, call: Call, num_prompts: int) -> None:
        super().__init__(call, num_prompts)
        self._id = new_id("cmpl-")
        self._choices = [_Choice() for _ in range(num_prompts * call.params.n)]

    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """See `Answer.read`."""
        choice, before = self._choices[index], self._choices[index].length
        choice.pieces.append(piece.text)
        choice.length += len(piece.text)
        if piece.token is not None and piece.logprobs is not None:
            choice.tokens.append(piece.token)
            choice.entries.append(piece.logprobs)
            choice.offsets.append(before)
        choice.finish_reason = piece.finish_reason
        if not (piece.text or piece.logprobs or piece.finish_reason or self.call.lists_tokens):
            return []
        logprobs = None
        if piece.token is not None and piece.logprobs is not None:
            logprobs = completion_logprobs(self.call.texts, [piece.token], [piece.logprobs], [before])
        reason = None if piece.finish_reason == "error" else piece.finish_reason
        shown = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}
        return [self._chunk([shown], **self.tokens_of(piece), **self.last_words(piece))]

    def end(self) -> list[Chunk]:
        """See `Answer.end`."""
        if not self.call.include_usage:
            return []
        return [self._chunk([], **self.speculation()) | {"usage": self.usage()}]

    def document(self) -> dict[str, Any]:
        """See `Answer.document`."""
        choices = [self._document(index, choice) for index, choice in enumerate(self._choices)]
        return self._named() | {"choices": choices, "usage": self.usage(), **self.speculation()}

    def _document(self, index: int, choice: _Choice) -> dict[str, Any]:
        prompt, sample = divmod(index, self.call.params.n)
        output = self.results[prompt]
        logprobs = None
        if self.call.params.logprobs is not None:
            logprobs = completion_logprobs(self.call.texts, choice.tokens, choice.entries, choice.offsets)
        value = {
            "index": index,
            "text": "".join(choice.pieces),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": output.outputs[sample].stop_reason,
        }
        if output.prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return value

    def _chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        usage = {"usage": None} if self.call.include_usage else {}
        return {**self._named(), "choices": choices, **usage, **rest}

    def _named(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self.call.created, "model": self.call.model}
