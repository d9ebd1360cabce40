"""`LLM`: prompts in, text out, in one process. The threads that wait for results run the engine's steps."""

from __future__ import annotations

import collections.abc
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from speculant.engine.engine import Engine
from speculant.engine.frontend import Frontend, Message
from speculant.engine.generation import Generation, Prompt, StreamPiece, split_prompts, with_token_texts
from speculant.engine.vllm_arguments import check_call
from speculant.errors import ConfigError, RequestError
from speculant.metrics import Metric, read_metrics
from speculant.params import SamplingParams
from speculant.text import Tokenizer
from speculant.types import CompletionOutput, Logprobs, RequestOutput, Sender, StepOutput

ShowProgress = bool | Callable[..., Any]


class LLM(Frontend[Iterator[StreamPiece]]):
    """Runs prompts to their end, or streams them, in the caller's own thread.

    Arguments are the fields of `EngineConfig`, see `Frontend`. Several threads may use one `LLM`: their prompts run in
    one batch, the threads take turns at its steps, and each gets its own results.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        super().__init__(model, draft_model, **arguments)
        self._ids = itertools.count()
        self._shared = SharedEngine(self._runtime.engine, self.tokenizer)

    @property
    def engine(self) -> Engine:
        """The engine itself, for measurements in one thread: it takes no turns with other threads of this `LLM`."""
        return self._runtime.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: ShowProgress = True,
        lora_request: object = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: object = None,
        mm_processor_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Complete prompts together; one result per prompt, in order.

        A prompt is a text, token ids (a list, a tuple, a numpy or torch array of whole numbers), or a mapping in the
        form of `TextPrompt` or `TokensPrompt`.
        One SamplingParams serves all prompts, or give one for each. A prompt that can't be served is refused before
        any of them runs: RequestError or ConfigError. One that fails later has finish_reason "error" and leaves the
        others alone; if all of them fail, the first error is raised.

        use_tqdm: see `progress`. priority: one number per prompt; a lower one is served sooner. The other arguments are
        vLLM's and must be None.
        """
        check_call(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        listed = split_prompts(prompts)
        each = zip(listed, self._params_for(listed, sampling_params), _priorities(listed, priority), strict=True)
        made = deque(
            self._generation(prompt, params, f"request-{next(self._ids)}", Sender(priority=rank))
            for prompt, params, rank in each
        )
        self._shared.check(made)
        with progress(use_tqdm, len(made)) as count:
            return self._run(made, count)

    def _run(self, made: deque[Generation], count: Callable[[], object]) -> list[RequestOutput]:
        """Run prompts to their end; `count` is called for each that has ended."""
        outputs, errors = dict[int, RequestOutput](), dict[int, Exception | None]()
        with closing(self._shared.run(made)) as ended:
            for number, generation in ended:
                outputs[number] = with_token_texts(generation.output(), self.tokenizer)
                errors[number] = generation.error
                count()
        if errors and errors[0] is not None and all(errors.values()):
            raise errors[0]
        return [outputs[number] for number in range(len(outputs))]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: object = None,
        use_tqdm: ShowProgress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest texts for each prompt, in vLLM's form; `generate` with `beam_width` does the same.

        use_tqdm and lora_request: see `generate`. concurrency_limit has no effect: max_num_seqs is the limit.
        """
        results = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request)
        return [BeamSearchOutput.of(result, params, self.tokenizer) for result in results]

    def get_metrics(self) -> list[Metric]:
        """Return the engine's totals under vLLM's names and under its own."""
        with self._shared.turn as engine:
            return read_metrics(engine.metrics, str(self.config.model))

    def reset_prefix_cache(self) -> bool:
        """Drop the prompts that are kept for later ones; return whether none is left. Open streams keep theirs."""
        with self._shared.turn as engine:
            return engine.reset_prefix_cache()

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[StreamPiece]:
        """Yield each token of a prompt's samples as it is committed; closing the iterator aborts.

        Several streams may be open at once, in several threads too: reading any of them advances all.
        Prompts of different salts share no cache, and drafts are looked up in texts of the same salt alone.
        """
        request_id = f"request-{next(self._ids)}"
        generation = self._generation(prompt, sampling_params, request_id, Sender(cache_salt=cache_salt))
        with closing(self._shared.stream(generation)) as pieces:
            for piece in pieces:
                yield self._readable(piece)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
        lora_request: object = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: object = None,
        mm_processor_kwargs: object = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several together; one result each, in order.

        The other arguments are those of `generate` and of `render_chat`, and so are the errors. Templates get a
        message's content as text, so that chat_template_content_format is "auto" or "string".
        """
        check_call(
            lora_request=lora_request,
            chat_template_content_format=chat_template_content_format,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        prompts = [
            self.render_chat(
                conversation,
                tools,
                add_generation_prompt,
                chat_template_kwargs,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
            )
            for conversation in _as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _params_for(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_params] * len(prompts)
        if len(given) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(given)} sampling parameters",
                "give one for each prompt, or one for all.",
            )
        return given


def _priorities(prompts: Sequence[object], given: Sequence[int] | None) -> Sequence[int]:
    if given is not None and len(given) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts came with {len(given)} priorities", "give one for each prompt.")
    return [0] * len(prompts) if given is None else given


def _as_conversations(messages: Any) -> Sequence[Any]:
    """Return several conversations as they are, and one conversation, a list of messages, in a list."""
    several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
    return messages if several else [messages]


@contextmanager
def progress(wanted: ShowProgress, total: int) -> Iterator[Callable[[], object]]:
    """Show how many of `total` prompts are done; the caller calls the returned function once for each.

    wanted: True shows a bar where standard error is a terminal, False none; a callable in tqdm's place makes the bar,
    wherever it is shown. Raises ConfigError for anything else.
    """
    if not isinstance(wanted, bool) and not callable(wanted):
        raise ConfigError(
            f"use_tqdm is a {type(wanted).__name__}",
            "set it to True, False or a callable like tqdm; give tools and the arguments after it by name.",
        )
    if not callable(wanted) and not (wanted and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda: None
        return
    bar = (wanted if callable(wanted) else _tqdm())(total=total, desc="Processed prompts", dynamic_ncols=True)
    try:
        yield lambda: bar.update(1)
    finally:
        bar.close()


def _tqdm() -> Callable[..., Any]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # huggingface-hub depends on it

    made: Callable[..., Any] = tqdm
    return made


class SharedEngine:
    """Runs generations of any number of threads in one batch. Callers that wait run the steps; it starts no thread.

    A thread has the engine for one `turn`: a step, or to add requests. Waiting threads take turns, so that a thread
    that steps again and again does not keep the others out.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.turn = EngineTurn(engine)
        self._receivers: dict[str, Callable[[StepOutput], None]] = {}  # by request id

    def check(self, generations: Iterable[Generation]) -> None:
        """Raise the error of the first generation that can't be served."""
        with self.turn as engine:
            for generation in generations:
                generation.check(engine)

    def run(self, waiting: deque[Generation]) -> collections.abc.Generator[tuple[int, Generation], None, None]:
        """Run generations together; yield each as it ends, with its number, and keep nothing of it.

        They are taken out of `waiting` and queued when the engine has places for them. Closing the iterator aborts
        requests that run. Raises the errors of `Engine.add_request`.
        """
        running, ended, count = dict[int, Generation](), deque[int](), 0
        try:
            while waiting or running:
                with self.turn as engine:
                    while waiting and _has_place(engine, waiting[0]):
                        generation = running[count] = waiting.popleft()
                        self._start(engine, generation, _end_noted(generation, count, ended))
                        count += 1
                    if not ended:
                        self._step(engine)
                while ended:
                    number = ended.popleft()
                    self._leave(running[number])
                    yield number, running.pop(number)
        finally:
            for generation in running.values():
                self._leave(generation)

    def stream(self, generation: Generation) -> collections.abc.Generator[StreamPiece, None, None]:
        """Yield each token of a generation as it is committed; closing the iterator aborts it.

        Raises the errors of `Engine.add_request`, and after the last piece the error of the generation, if any.
        """
        unread = deque[StreamPiece | Exception]()
        with self.turn as engine:
            self._start(engine, generation, _piece_noted(generation, unread))
        try:
            while self._advance(generation, unread):
                while unread:
                    item = unread.popleft()
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            self._leave(generation)
        if generation.error is not None:
            raise generation.error

    def _advance(self, generation: Generation, unread: deque[StreamPiece | Exception]) -> bool:
        """Step if nothing is unread; return whether a generation has, or will have, more pieces."""
        with self.turn as engine:
            if not unread and not generation.finished:
                self._step(engine)
            return bool(unread) or not generation.finished

    def _start(self, engine: Engine, generation: Generation, receive: Callable[[StepOutput], None]) -> None:
        generation.start(engine, self._tokenizer)
        self._receivers[generation.request_id] = receive

    def _step(self, engine: Engine) -> None:
        for output in engine.step():
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                receive(output)

    def _leave(self, generation: Generation) -> None:
        """Forget a generation; if it has not ended, abort it before the next step."""
        self._receivers.pop(generation.request_id, None)
        if not generation.finished:
            self.turn.abort(generation.request_id)


class EngineTurn:
    """Lends an engine, as a context manager, to one thread after the other; nothing else reaches it.

    `threading.Lock` alone may be taken again by the thread that has just released it. So a thread queues for it in
    `_next`, and only the first one of the queue waits for `_lock`.

    The garbage collector may close a generator anywhere, even inside a step; so `abort` waits for no lock.
    """

    def __init__(self, engine: Engine) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._engine, self._aborted = engine, deque[str]()

    def __enter__(self) -> Engine:
        with self._next:
            self._lock.acquire()
        return self._engine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        self._abort_now()

    def abort(self, request_id: str) -> None:
        """End a request: at once if no thread has the engine, else when it gives it back."""
        self._aborted.append(request_id)
        self._abort_now()

    def _abort_now(self) -> None:
        while self._aborted and self._lock.acquire(blocking=False):
            try:
                while self._aborted:
                    self._engine.abort(self._aborted.popleft())
            finally:
                self._lock.release()


def _has_place(engine: Engine, generation: Generation) -> bool:
    """Whether to queue a generation now; an empty engine queues it or raises the reason."""
    return engine.accepts(generation.params.n) or not engine.has_unfinished()


def _end_noted(generation: Generation, number: int, ended: deque[int]) -> Callable[[StepOutput], None]:
    """Return a receiver that notes the end of a generation's last sample."""
    left = generation.params.n

    def receive(output: StepOutput) -> None:
        nonlocal left
        left -= output.finish_reason is not None
        if not left:
            ended.append(number)

    return receive


def _piece_noted(generation: Generation, unread: deque[StreamPiece | Exception]) -> Callable[[StepOutput], None]:
    """Return a receiver that makes the pieces of a generation; text that can't be made raises in its reader."""

    def receive(output: StepOutput) -> None:
        try:
            unread.append(generation.piece(output))
        except Exception as error:  # noqa: BLE001 - it is not the error of the thread that happens to step
            unread.append(error)

    return receive


@dataclass(frozen=True)
class BeamSearchParams:
    """The settings of `LLM.beam_search`, which finds the beam_width best texts of at most max_tokens tokens.

    They are ranked by the sum of their log-probabilities / number of generated tokens ** length_penalty, under the
    distribution at temperature 1, whether temperature is 0 or 1. include_stop_str_in_output: an end token belongs to
    the text. Raises ConfigError for other temperatures and for structured_outputs.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise ConfigError("a beam search takes no structured_outputs", "use LLM.generate for a form.")
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Return the settings of the same search for `LLM.generate`."""
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """One text that was found.

    tokens: the prompt's and the text's. text: of all these. cum_logprob: of the generated tokens. logprobs is
    empty: no alternatives are kept.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(frozen=True)
class BeamSearchOutput:
    """The texts that were found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, result: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
        """Return a result of `LLM.generate` in this shape."""
        prompt = result.prompt_token_ids
        found = [sample for sample in result.outputs if sample.finish_reason != "error"]  # there may be fewer texts
        return cls([_sequence(prompt, sample, params, tokenizer) for sample in found])


def _sequence(
    prompt: list[int], sample: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchSequence:
    own = sample.token_ids
    if sample.finish_reason == "stop" and not params.include_stop_str_in_output:
        own = own[:-1]
    tokens = [*prompt, *own]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return BeamSearchSequence(tokens, sample.cumulative_logprob or 0.0, text, sample.finish_reason, sample.stop_reason)
