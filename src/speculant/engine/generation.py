"""One prompt on its way through the engine: its settings, its sequences, their texts, and the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from speculant.constraints import Constraint
from speculant.engine.engine import Engine
from speculant.engine.logprobs import LogprobRow
from speculant.engine.prompts import TokenisedPrompt
from speculant.engine.requests import CheckedRequest
from speculant.errors import RequestError, SpeculantError
from speculant.metrics import RequestMetrics
from speculant.params import SamplingParams
from speculant.text.stream import StopStrings, TextStream
from speculant.text.tokenizer import Tokenizer
from speculant.types import ANYONE, Client, CompletionOutput, Logprobs, Request, RequestOutput, StepOutput


@dataclass(frozen=True)
class StreamPiece:
    """One committed token as it is streamed. `text` may be empty while a character is incomplete.

    `drafted` marks an accepted draft token, `corrected` the target's own token where a draft token was rejected;
    `logprobs` are the token's, if requested, without texts; `output` comes with a request's last piece; `stop_reason`
    is that of `CompletionOutput`, with a sample's last piece.
    """

    index: int
    token: int | None  # None ends a sample that failed
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
        priority: int = 0,
        stops: StopStrings | None = None,
        constrain: Callable[[], Constraint] | None = None,
        client: Client = ANYONE,
    ) -> None:
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is a {type(request_id).__name__}", "give it as str.")
        self.request_id, self.params = request_id, params
        self._prompt, self._stops = prompt, stops
        self._priority, self._constrain, self._client = priority, constrain, client
        self._checked: CheckedRequest | None = None
        self._requests: list[Request] = []
        self._closed: set[int] = set()
        self._failed: dict[int, SpeculantError] = {}  # samples whose last text can't be decoded
        self._num_pieces: Counter[int] = Counter()  # by sample

    def check(self, engine: Engine) -> CheckedRequest:
        """Raise RequestError or ConfigError if the engine can't serve the prompt; a second call checks nothing."""
        if self._checked is None:
            self._checked = engine.check_request(
                self._prompt.tokens,
                self.params,
                priority=self._priority,
                cache_salt=self._prompt.cache_salt,
                constraint=self._constrain,
                client=self._client,
                source=self._prompt.source,
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
            reason, stop = self._reason(request), request.stop_reason
        return StreamPiece(
            output.index, output.token, text, output.drafted, reason, done, logprobs, output.corrected, stop
        )

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
            stop_reason=request.stop_reason,
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
        return "error" if request.index in self._failed else request.finish_reason

    def _errors(self) -> list[Exception | None]:
        return [request.error or self._failed.get(request.index) for request in self._requests]


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
    assert isinstance(request.stop_checker, TextStream)
    return request.stop_checker
