"""The answer of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speculant.engine import StreamPiece
from speculant.serving.answers import Answer, Call, Chunk, new_id
from speculant.serving.prompts import Prompt
from speculant.serving.token_texts import completion_logprobs, prompt_logprobs
from speculant.text import TokenOffsets
from speculant.types import Logprobs


@dataclass
class _CompletionChoice:
    """One sample: its text so far, and the offset of each token that has log-probabilities."""

    places: TokenOffsets
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[Logprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    """Choices in the order of the prompts, `n` for each."""

    def __init__(self, call: Call, num_prompts: int, echo: bool = False, answers: bool = True) -> None:
        """echo: the text begins with the prompt. answers: False = only the prompt is returned."""
        super().__init__(call, num_prompts)
        self._id, self._echo, self._answers = new_id("cmpl-"), echo, answers
        self._choices: list[_CompletionChoice] = []

    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        """See `Answer.begin`."""
        texts, params = self.call.texts, self.call.params
        for prompt in prompts:
            before = prompt.text or "" if self._echo else ""
            places = [texts.places(params.skip_special_tokens, len(before)) for _ in range(params.n)]
            self._choices += [_CompletionChoice(each, [before]) for each in places]
        if not (self._echo or self.call.returns_ids):
            return []
        return [self._first(index, choice) for index, choice in enumerate(self._choices)]

    def _first(self, index: int, choice: _CompletionChoice) -> Chunk:
        ids: dict[str, Any] = {}
        if self.call.returns_ids:
            prompt = self.prompts[index // self.call.params.n]
            ids = {**_ids_of_prompt(prompt.tokens, prompt.source), "token_ids": []}
        text = "".join(choice.pieces)
        return self._chunk([{"index": index, "text": text, "logprobs": None, "finish_reason": None, **ids}])

    def feed(self, prompt: int, piece: StreamPiece) -> list[Chunk]:
        """See `Answer.feed`."""
        if not self._answers:
            reason = piece.finish_reason and ("error" if piece.finish_reason == "error" else "length")
            piece = replace(piece, token=None, text="", logprobs=None, finish_reason=reason)
        return super().feed(prompt, piece)

    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """See `Answer.read`."""
        choice, logprobs = self._choices[index], None
        choice.pieces.append(piece.text)
        if piece.token is not None and piece.logprobs is not None:
            place = choice.places.next(piece.token)
            choice.tokens.append(piece.token)
            choice.entries.append(piece.logprobs)
            choice.offsets.append(place)
            logprobs = completion_logprobs(self.call.texts, [piece.token], [piece.logprobs], [place])
        choice.finish_reason = piece.finish_reason
        ids = self.ids_of(piece)
        if not (piece.text or piece.logprobs or piece.finish_reason or ids or self.call.lists_tokens):
            return []
        reason = None if piece.finish_reason == "error" else piece.finish_reason
        stop = {} if reason is None else {"stop_reason": piece.stop_reason}
        shown = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason, **stop, **ids}
        return [self._chunk([shown], **self.tokens_of(piece), **self.last_speculation(piece))]

    def end(self) -> list[Chunk]:
        """See `Answer.end`."""
        if not self.call.include_usage:
            return []
        return [self._chunk([], **self.speculation()) | {"usage": self.usage()}]

    def document(self) -> dict[str, Any]:
        """See `Answer.document`."""
        choices = [self._document(index, choice) for index, choice in enumerate(self._choices)]
        return self._named() | {"choices": choices, "usage": self.usage(), **self.speculation()}

    def _document(self, index: int, choice: _CompletionChoice) -> dict[str, Any]:
        prompt, sample = divmod(index, self.call.params.n)
        output = self.results[prompt]
        logprobs = None
        if self.call.params.logprobs is not None:
            tokens, entries, offsets = self._echoed(prompt)
            logprobs = completion_logprobs(
                self.call.texts, [*tokens, *choice.tokens], [*entries, *choice.entries], [*offsets, *choice.offsets]
            )
        value = {
            "index": index,
            "text": "".join(choice.pieces),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": output.outputs[sample].stop_reason,
        }
        if self.call.returns_ids:
            made = self.ids_of_output(output.outputs[sample]) if self._answers else {"token_ids": []}
            value |= {**_ids_of_prompt(output.prompt_token_ids, output.encoder_prompt_token_ids), **made}
        if output.prompt_logprobs is not None and not self._echo:
            value["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return value

    def _echoed(self, prompt: int) -> tuple[Sequence[int], Sequence[Logprobs | None], Sequence[int]]:
        """Return the tokens of a repeated prompt, their log-probabilities, and the offsets of their texts."""
        output = self.results[prompt]
        if not self._echo or output.prompt_logprobs is None:
            return (), (), ()
        return output.prompt_token_ids, output.prompt_logprobs, self.prompts[prompt].offsets

    def usage(self, reasoning_tokens: int = 0) -> dict[str, Any]:
        """See `Answer.usage`; an answer that is left out does not count."""
        value = super().usage(reasoning_tokens)
        if not self._answers:
            value |= {"completion_tokens": 0, "total_tokens": value["prompt_tokens"]}
        return value

    def _chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        return {**self._named(), "choices": choices, **self.chunk_usage(), **rest}

    def _named(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self.call.created, "model": self.call.model}


def _ids_of_prompt(tokens: Sequence[int], source: Sequence[int] | None) -> dict[str, Any]:
    given = {} if source is None else {"encoder_prompt_token_ids": list(source)}
    return {**given, "prompt_token_ids": list(tokens)}
