"""Answers of chats and completions. An answer is the same streamed or in one piece."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from typing_extensions import override

from speculant.engine import StreamPiece
from speculant.params import SamplingParams
from speculant.serving.openai.messages import MessageReader, joined_calls
from speculant.serving.openai.settings import Prompt
from speculant.serving.wire import Deferred
from speculant.text import Tokenizer, TokenOffsets, byte_table, fallback_byte
from speculant.types import CompletionOutput, Logprob, Logprobs, RequestOutput


@dataclass(frozen=True)
class Call:
    """The facts about a request that its answer needs.

    model: as named by the client. predicted: drafts come from the user's prediction alone. level: how many figures on
    speculation the answer has. lists_tokens: chunks have `speculant_tokens`. returns_ids: choices have their token ids.
    continuous_usage: each chunk has the usage so far.
    """

    model: str
    params: SamplingParams
    texts: TokenTexts
    level: str = "none"
    predicted: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    lists_tokens: bool = False
    returns_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


Chunk = Mapping[str, Any]


class Answer(ABC):
    """Reads the pieces of a request in order. outputs: the result of each prompt, None until it is complete.

    prompts: set before `begin`. readers: of each sample of a chat, from `begin` on. generated: tokens so far. requests:
    the ids of the engine's requests, once there are some. is_over: nothing more is needed, so they may end.
    """

    is_over = False

    def __init__(self, call: Call, num_prompts: int) -> None:
        self.call = call
        self.outputs: list[RequestOutput | None] = [None] * num_prompts
        self.prompts: Sequence[Prompt] = ()
        self.readers: Sequence[MessageReader] = ()
        self.requests: Sequence[str] = ()
        self.generated = 0

    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        """Return the chunks before the first piece."""
        return []

    def feed(self, prompt: int, piece: StreamPiece) -> list[Chunk]:
        """Read a piece and return its chunks, if any."""
        if piece.output is not None:
            self.outputs[prompt] = piece.output
        self.generated += piece.token is not None
        return self.read(prompt * self.call.params.n + piece.index, piece)

    @abstractmethod
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """Read a piece of one choice and return its chunks, if any."""

    @abstractmethod
    def end(self) -> list[Chunk]:
        """Return the chunks after the last piece."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return the whole answer, after the last piece."""

    @property
    def results(self) -> list[RequestOutput]:
        """The results of the prompts that are complete."""
        return [output for output in self.outputs if output is not None]

    def usage(self, reasoning_tokens: int = 0) -> dict[str, Any]:
        """Return the usage of tokens; see `usage`."""
        return usage(self.results, self.call.predicted, reasoning_tokens)

    def chunk_usage(self) -> dict[str, Any]:
        """Return the usage entry of a chunk before the last one."""
        if not self.call.include_usage:
            return {}
        if not self.call.continuous_usage:
            return {"usage": None}
        prompt = sum(each.num_tokens for each in self.prompts)
        total = prompt + self.generated
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": self.generated, "total_tokens": total}}

    def speculation(self) -> dict[str, Any]:
        """Return the answer's figures on speculation; see `speculation`."""
        return speculation(self.results, self.call.level)

    def last_speculation(self, piece: StreamPiece) -> dict[str, Any]:
        """Return the figures on speculation for the last piece's chunk, unless a chunk with the usage has them."""
        last = piece.output is not None and len(self.results) == len(self.outputs)
        return self.speculation() if last and not self.call.include_usage else {}

    def tokens_of(self, piece: StreamPiece) -> dict[str, Any]:
        """Return a piece's entry of `speculant_tokens`, if the request wants it."""
        if not self.call.lists_tokens:
            return {}
        return {"speculant_tokens": [{"text": piece.text, "drafted": piece.drafted, "corrected": piece.corrected}]}

    def ids_of(self, piece: StreamPiece) -> dict[str, Any]:
        """Return the token id of a piece for a chunk's choice, if the request wants it."""
        if not self.call.returns_ids:
            return {}
        return {"token_ids": [] if piece.token is None else [piece.token]}

    def ids_of_output(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the token ids of a choice, if the request wants them."""
        return {"token_ids": list(output.token_ids)} if self.call.returns_ids else {}


def new_id(kind: str) -> str:
    """Return an id such as `cmpl-...`."""
    return kind + secrets.token_hex(16)


def usage(outputs: Sequence[RequestOutput], predicted: bool, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return `usage` in OpenAI's shape, over all prompts.

    predicted: all drafts came from the user's prediction, so their counts are those of the prediction.
    """
    prompt = sum(output.num_prompt_tokens for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    specs = [output.metrics.speculative_decoding for output in outputs] if predicted else []
    accepted = sum(spec.num_accepted_draft_tokens for spec in specs)
    drafted = sum(spec.num_draft_tokens for spec in specs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def speculation(outputs: Sequence[RequestOutput], level: str) -> dict[str, Any]:
    """Return a response's figures on speculation, in vLLM's shape: the key `metrics`, or nothing.

    `tokens_per_pass` is added to vLLM's figures. level: "none", "summary" or "detailed". The figures are those of a
    single sample; they are None for several.
    """
    if level == "none":
        return {}
    if len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return {"metrics": None}
    metrics = outputs[0].metrics
    if metrics.verification is None:
        return {"metrics": {"speculative_decoding": None}}
    figures = {"tokens_per_pass": metrics.tokens_per_pass, **metrics.to_dict()["speculative_decoding"]}
    if level == "detailed":
        figures |= metrics.speculative_decoding.steps()
    return {"metrics": {"speculative_decoding": figures}}


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

    @override
    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
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

    @override
    def feed(self, prompt: int, piece: StreamPiece) -> list[Chunk]:
        if not self._answers:
            reason = piece.finish_reason and ("error" if piece.finish_reason == "error" else "length")
            piece = replace(piece, token=None, text="", logprobs=None, finish_reason=reason)
        return super().feed(prompt, piece)

    @override
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
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

    @override
    def end(self) -> list[Chunk]:
        if not self.call.include_usage:
            return []
        return [self._chunk([], **self.speculation()) | {"usage": self.usage()}]

    @override
    def document(self) -> dict[str, Any]:
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

    @override
    def usage(self, reasoning_tokens: int = 0) -> dict[str, Any]:
        """An answer that is left out does not count."""
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

    @override
    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        self.readers = [self._make_reader(prompts[0]) for _ in range(self.call.params.n)]
        self._choices = [_ChatChoice(reader) for reader in self.readers]
        first = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": list(prompts[0].tokens)} if self.call.returns_ids else {}
        return [self._chunk([_shown(index, first)], **ids) for index in range(self.call.params.n)]

    @override
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
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

    @override
    def end(self) -> list[Chunk]:
        if not self.call.include_usage:
            return []
        return [self._chunk([], **self.speculation()) | {"usage": self._usage()}]

    @override
    def document(self) -> dict[str, Any]:
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


LOWEST = -9999.0  # in place of minus infinity, which JSON can't hold; OpenAI's value
_CACHED = 16_384


class TokenTexts:
    """The text and the bytes of tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.backend.get_added_tokens_decoder())
        is_byte_level = any(step["type"] == "ByteLevel" for step in tokenizer.decoder_steps)
        self._bytes_of = byte_table() if is_byte_level else None
        self.of = lru_cache(_CACHED)(self._of)

    def places(self, skip_special_tokens: bool, start: int = 0) -> TokenOffsets:
        """Return where the texts of the tokens of an answer begin; start: characters before the answer."""
        return TokenOffsets(self._tokenizer, skip_special_tokens, start)

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and bytes. Part of a character is written as OpenAI does: `bytes:` and hex codes."""
        data = self._bytes(token)
        if data is None:
            return self._tokenizer.decode_alone(token) or "", None
        try:
            return data.decode("utf-8"), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def _bytes(self, token: int) -> bytes | None:
        raw = self._tokenizer.backend.id_to_token(token)
        if raw is None:
            return None
        if token not in self._added:
            if self._bytes_of is not None and all(character in self._bytes_of for character in raw):
                return bytes(self._bytes_of[character] for character in raw)
            if (byte := fallback_byte(raw)) is not None:
                return byte
        text = self._tokenizer.decode_alone(token)
        return None if text is None else text.encode("utf-8", "replace")


def chat_logprob(texts: TokenTexts, token: int, entry: Logprobs, top: int) -> dict[str, Any]:
    """Return one token's entry of a chat's `logprobs.content`, with its `top` most likely alternatives; -1 = all."""
    best = sorted(entry.items(), key=lambda each: each[1].rank)[: top if top >= 0 else None]
    alternatives = [_alone(texts, other, value) for other, value in best]
    return {**_alone(texts, token, entry[token]), "top_logprobs": alternatives}


def _alone(texts: TokenTexts, token: int, value: Logprob) -> dict[str, Any]:
    text, data = texts.of(token)
    return {"token": text, "logprob": finite(value.logprob), "bytes": data}


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: Sequence[Logprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return a completion's `logprobs`. offsets: where each token's text begins in the answer.

    entries: None for the first token of a prompt, which has no log-probability.
    """
    pairs = list(zip(tokens, entries, strict=True))
    return {
        "tokens": [texts.of(token)[0] for token in tokens],
        "token_logprobs": [None if entry is None else finite(entry[token].logprob) for token, entry in pairs],
        "top_logprobs": [None if entry is None else Deferred(partial(_by_text, texts, entry)) for entry in entries],
        "text_offset": list(offsets),
    }


def _by_text(texts: TokenTexts, entry: Logprobs) -> dict[str, float]:
    """Return alternatives by their texts, the most likely first. Of several with one text, the most likely counts."""
    values: dict[str, float] = {}
    for token, value in sorted(entry.items(), key=lambda each: each[1].rank):
        values.setdefault(texts.of(token)[0], finite(value.logprob))
    return values


def prompt_logprobs(entries: Sequence[Logprobs | None] | None) -> list[Deferred | None] | None:
    """Return a prompt's log-probabilities in vLLM's shape: by token id, None for the first token."""
    if entries is None:
        return None
    return [None if entry is None else Deferred(partial(_by_id, entry)) for entry in entries]


def _by_id(entry: Logprobs) -> dict[str, Any]:
    return {
        str(token): {"logprob": finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token, value in entry.items()
    }


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(value, LOWEST)
