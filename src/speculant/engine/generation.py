"""Prompts: the forms in which callers give them, and one prompt on its way through the engine.

On its way it has its settings, its sequences, their texts, and the outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import index
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from speculant.checks import is_whole
from speculant.constraints import Constraint
from speculant.engine.engine import Engine
from speculant.engine.logprobs import LogprobRow
from speculant.engine.requests import CheckedRequest
from speculant.errors import RequestError, SpeculantError, suggest
from speculant.metrics import RequestMetrics
from speculant.params import SamplingParams
from speculant.structured import Reasoning
from speculant.text import ExpectedReasoning, StopStrings, TextStream, Tokenizer
from speculant.types import NOBODY, CompletionOutput, Logprobs, Request, RequestOutput, Sender, StepOutput


class TextPrompt(TypedDict):
    """A text to complete. cache_salt: only prompts of the same salt share a cache."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids to complete. prompt: their text, which results repeat. cache_salt: see `TextPrompt`."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class PlainPrompt(NamedTuple):
    """The content of a prompt: its text, its token ids or both, and a salt."""

    text: str | None = None
    tokens: list[int] | None = None
    cache_salt: str = ""


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a conversation in the model's format. It already has its special tokens, so none are added.

    tokens: its token ids, if they are known already. reasoning: the tokens around the reasoning that may come before
    an answer of a given form; None = the form begins at once. expected: the reasoning that other answers may have.
    """

    text: str
    tokens: Sequence[int] | None = None
    reasoning: Reasoning | None = None
    expected: ExpectedReasoning | None = None


Plain = str | Sequence[int] | TextPrompt | TokensPrompt  # or an array of whole numbers


class ExplicitEncoderDecoderPrompt(TypedDict):
    """The source of an encoder-decoder model, and the beginning of its output; None = the model's start tokens alone.

    Start tokens that the decoder's prompt lacks come before it. cache_salt: see `TextPrompt`.
    """

    encoder_prompt: Plain
    decoder_prompt: NotRequired[Plain | None]
    cache_salt: NotRequired[str]


class PromptPair(NamedTuple):
    """The content of an `ExplicitEncoderDecoderPrompt`."""

    encoder: PlainPrompt
    decoder: PlainPrompt | None = None
    cache_salt: str = ""


Prompt = Plain | RenderedPrompt | ExplicitEncoderDecoderPrompt


@dataclass(frozen=True)
class TokenisedPrompt:
    """A prompt as token ids, with its text if it came with one. source: what an encoder reads, with its own text."""

    text: str | None
    tokens: Sequence[int]
    source_text: str | None = None
    source: Sequence[int] = ()


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MEDIA = "images, audio and video are not supported; the models here read text"
_PAIR = ("encoder_prompt", "decoder_prompt", "cache_salt")
REFUSED: Mapping[str, str] = {
    "multi_modal_data": _MEDIA,
    "multi_modal_uuids": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "prompt_embeds": "a prompt can't be given as embeddings",
    "token_type_ids": "the models here have no types of tokens",
}
_FORMS = 'give a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those.'


def split_prompts(given: Any) -> list[Any]:
    """Return the prompts that were given: one, or several in a list, a tuple, an iterator or a two-dimensional array.

    A sequence that begins with a whole number is one prompt of token ids. Raises RequestError for anything else.
    """
    if isinstance(given, np.ndarray | Tensor):
        return list(given) if given.ndim == 2 else [given]
    if isinstance(given, Iterator):
        return list(given)
    if not _is_list(given):
        return [given]
    return [given] if len(given) > 0 and _is_number(given[0]) else list(given)


def read_prompt(given: object) -> PlainPrompt | PromptPair:
    """Return the content of one prompt. Raises RequestError for one that can't be read."""
    is_pair = isinstance(given, Mapping) and any(given.get(key) is not None for key in _PAIR[:2])
    return _read_pair(given) if is_pair else _read_plain(given)


def _read_pair(given: Any) -> PromptPair:
    _check_keys(given, _PAIR)
    encoder, decoder, salt = (given.get(key) for key in _PAIR)
    if encoder is None:
        raise RequestError("a prompt has a decoder_prompt and no encoder_prompt", "give both, or one prompt.")
    _check_text("cache_salt", salt)
    own, start = _read_plain(encoder), None if decoder is None else _read_plain(decoder)
    salts = {salt or "", own.cache_salt, start.cache_salt if start else ""} - {""}
    if len(salts) > 1:
        raise RequestError("the parts of a prompt, or the prompt around them, have different cache salts", "give one.")
    return PromptPair(own, start, next(iter(salts), ""))


def _read_plain(given: object) -> PlainPrompt:
    if isinstance(given, str):
        return PlainPrompt(given)
    if not isinstance(given, Mapping):
        return PlainPrompt(tokens=_token_ids(given, "a prompt"))
    _check_keys(given, _KEYS)
    text, tokens, salt = (given.get(key) for key in _KEYS)
    if text is None and tokens is None:
        raise RequestError("a prompt has neither prompt nor prompt_token_ids", _FORMS)
    _check_text("prompt", text)
    _check_text("cache_salt", salt)
    return PlainPrompt(text, None if tokens is None else _token_ids(tokens, "prompt_token_ids"), salt or "")


def _check_keys(given: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Check that a mapping has only known keys, and others that are None."""
    for key, value in given.items():
        if key in REFUSED and value is not None:
            raise RequestError(f"a prompt has {key}: {REFUSED[key]}", f"leave out {key}.")
        if key not in known and not (value is None and (key in REFUSED or key in _PAIR)):
            raise RequestError(f"a prompt has the unknown key {key!r}", suggest(str(key), known))


def _check_text(key: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{key} of a prompt is a {type(value).__name__}", f"give {key} as text.")


def _token_ids(given: Any, name: str) -> list[int]:
    if isinstance(given, np.ndarray | Tensor):
        return _ids_of_array(given, name)
    if not _is_list(given):
        raise RequestError(f"{name} is a {type(given).__name__}", _FORMS)
    if set(map(type, given)) <= {int}:  # nearly always, and a prompt may be long
        return list(given)
    for token in given:
        if not _is_number(token):
            raise RequestError(f"{name} has {token!r:.80}, which is not a token id", "give token ids as whole numbers.")
    return list(map(index, given))


def _ids_of_array(given: Any, name: str) -> list[int]:
    if given.ndim != 1 or not _has_whole_numbers(given):
        raise RequestError(
            f"{name} is an array of {given.dtype} with {given.ndim} dimensions",
            "give whole numbers in one dimension; in two dimensions each row is a prompt.",
        )
    ids: list[int] = given.tolist()
    return ids


def _has_whole_numbers(given: Any) -> bool:
    if isinstance(given, Tensor):
        return not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    return np.issubdtype(given.dtype, np.integer)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def _is_number(given: Any) -> bool:
    """Whether an element of a list is a whole number; a truth value is not one."""
    if isinstance(given, Tensor | np.ndarray | np.generic):
        return given.ndim == 0 and _has_whole_numbers(given)
    return is_whole(given)


@dataclass(frozen=True)
class StreamPiece:
    """One committed token as it is streamed. `text` may be empty while a character is incomplete.

    `drafted` marks an accepted draft token, `corrected` the target's own token where a draft token was rejected;
    `logprobs` are the token's, if requested, without texts; `output` comes with a request's last piece; `stop_reason`
    is that of `CompletionOutput`, with a sample's last piece.
    """

    index: int
    token: int | None  # None ends a sample that failed, or that was ended
    text: str
    drafted: bool = False
    finish_reason: str | None = None
    output: RequestOutput | None = None
    logprobs: Logprobs | None = None
    corrected: bool = False
    stop_reason: int | str | None = None


class Generation:
    """A tokenised prompt and, once it was queued, its `n` sequences.

    stops: the stop strings of `params`, compiled; None = none.
    constrain: makes the constraint of a sequence; None = there is none.
    Raises RequestError for an id of another type.
    """

    def __init__(
        self,
        request_id: str,
        prompt: TokenisedPrompt,
        params: SamplingParams,
        sender: Sender = NOBODY,
        stops: StopStrings | None = None,
        constrain: Callable[[], Constraint] | None = None,
    ) -> None:
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is a {type(request_id).__name__}", "give it as str.")
        self.request_id, self.params = request_id, params
        self._prompt, self._sender, self._stops, self._constrain = prompt, sender, stops, constrain
        self._checked: CheckedRequest | None = None
        self._requests: list[Request] = []
        self._closed: set[int] = set()
        self._failed: dict[int, SpeculantError] = {}  # samples whose last text can't be decoded
        self._num_pieces: Counter[int] = Counter()  # by sample

    def check(self, engine: Engine) -> CheckedRequest:
        """Raise RequestError or ConfigError if the engine can't serve the prompt; a second call checks nothing."""
        if self._checked is None:
            self._checked = engine.check_request(
                self._prompt.tokens, self.params, self._sender, self._constrain, self._prompt.source
            )
        return self._checked

    def start(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """Queue the prompt. If it raises an error of `Engine.add_request`, nothing is queued."""
        stop_checker = partial(TextStream, tokenizer, self.params, self._stops)
        self._requests = engine.add_checked(self.check(engine), self.request_id, stop_checker)

    @property
    def error(self) -> Exception | None:
        """The first sequence's error, if all sequences ended with one."""
        errors = self._errors()
        return errors[0] if all(errors) else None

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(request.finished for request in self._requests)

    def piece(self, output: StepOutput) -> StreamPiece:
        """Return the piece of one committed token; the last one of a sample has the text that was held back."""
        request = self._requests[output.index]
        text = _stream(request).pop() if output.token is not None else ""
        logprobs = self._next_logprobs(request) if output.token is not None else None
        reason, done, stop = None, None, None
        if output.finish_reason is not None:
            text += self._close(request)
            done = self.output() if len(self._closed) == len(self._requests) else None
            reason, stop = self._reason(request), request.ending.stop
        return StreamPiece(
            output.index, output.token, text, output.drafted, reason, done, logprobs, output.corrected, stop
        )

    def last_outputs(self) -> list[StepOutput]:
        """Return the last outputs of the samples that would end now with the tokens that they have."""
        running = (request for request in self._requests if not request.finished and request.search is None)
        return [StepOutput(self.request_id, request.index, None, False, "length") for request in running]

    def _next_logprobs(self, request: Request) -> Logprobs | None:
        """Return the log-probabilities of the next token that is streamed, if they were requested."""
        place = self._num_pieces[request.index]
        self._num_pieces[request.index] += 1
        return request.logprobs[place] if request.params.logprobs is not None else None

    @property
    def begun(self) -> bool:
        """Whether a sequence has taken part in a pass."""
        return any(request.metrics.timing.target_passes for request in self._requests)

    def output(self) -> RequestOutput:
        """Return the current state; log-probabilities have no text yet, see `with_token_texts`."""
        first, given = self._requests[0], self._prompt
        outputs = [self._completion(request) for request in self._requests]
        return RequestOutput(
            request_id=self.request_id,
            prompt=given.text,
            prompt_token_ids=list(first.prompt),
            outputs=outputs,
            finished=self.finished,
            metrics=RequestMetrics.pooled([request.metrics for request in self._requests]),
            prompt_logprobs=self._prompt_logprobs(first),
            error=next((str(error) for error in self._errors() if error), None),
            encoder_prompt=given.source_text,
            encoder_prompt_token_ids=list(first.source) if first.source else None,
        )

    def _completion(self, request: Request) -> CompletionOutput:
        if request.finished:
            self._close(request)
        search = request.search
        found = search.result(request.index) if search else None
        return CompletionOutput(
            index=request.index,
            text=_stream(request).text,
            token_ids=request.output,
            finish_reason=self._reason(request),
            stop_reason=request.ending.stop,
            logprobs=None if request.params.logprobs is None else list(request.logprobs),
            cumulative_logprob=found.logprob if found else request.cumulative_logprob,
            score=search.score(request.index) if search else None,
            metrics=request.metrics,
        )

    def _prompt_logprobs(self, request: Request) -> list[Logprobs | None] | None:
        """Nothing precedes the first token, so its entry is None."""
        if request.params.prompt_logprobs is None:
            return None
        return [None, *request.prompt_logprobs]

    def _close(self, request: Request) -> str:
        """Release the text that a finished sample held back, once; text that can't be decoded fails this sample."""
        if request.index in self._closed:
            return ""
        self._closed.add(request.index)
        try:
            return _stream(request).finish()
        except SpeculantError as error:
            self._failed[request.index] = error
            return ""

    def _reason(self, request: Request) -> str | None:
        return "error" if request.index in self._failed else request.ending.reason

    def _errors(self) -> list[Exception | None]:
        return [request.ending.error or self._failed.get(request.index) for request in self._requests]


def with_token_texts(output: RequestOutput, tokenizer: Tokenizer) -> RequestOutput:
    """Return an output whose log-probabilities have the text of each token.

    A token is decoded when its text is first read, in the reader's thread, and once for an output.
    """
    text_of = cache(tokenizer.decode_alone)

    def readable(entry: Logprobs) -> Logprobs:
        return entry.with_texts(text_of) if isinstance(entry, LogprobRow) else entry

    samples = [
        sample if sample.logprobs is None else replace(sample, logprobs=[readable(entry) for entry in sample.logprobs])
        for sample in output.outputs
    ]
    given = output.prompt_logprobs
    prompt = None if given is None else [None if entry is None else readable(entry) for entry in given]
    return replace(output, outputs=samples, prompt_logprobs=prompt)


def _stream(request: Request) -> TextStream:
    assert isinstance(request.stops.checker, TextStream)
    return request.stops.checker
