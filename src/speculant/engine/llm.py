"""`LLM`: prompts in, text out, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from speculant.engine.frontend import Frontend, Message, Prompt, RenderedPrompt
from speculant.engine.generation import Generation, StreamPiece, with_token_texts
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.types import RequestOutput


class LLM(Frontend):
    """Runs prompts to their end, or streams them, in the caller's own thread.

    Arguments are the fields of `EngineConfig`, see `Frontend`.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        super().__init__(model, draft_model, **arguments)
        self.engine = self._runtime.engine
        self._ids = itertools.count()
        self._generations: dict[str, Generation] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) together; one result per prompt, in order.

        One SamplingParams serves all prompts, or give one for each. A prompt that can't be served is refused before
        any of them runs: RequestError or ConfigError. One that fails later has finish_reason "error" and leaves the
        others alone; if all of them fail, the first error is raised.
        """
        listed = _as_prompts(prompts)
        pairs = zip(listed, self._params_for(listed, sampling_params), strict=True)
        made = [self._generation(prompt, params, f"request-{next(self._ids)}") for prompt, params in pairs]
        for generation in made:
            generation.check(self.engine)
        generations: list[Generation] = []
        try:
            for generation in made:
                while not self.engine.accepts(generation.params.n) and self.engine.has_unfinished():
                    self._step()
                generations.append(self._start(generation))
            while not all(generation.finished for generation in generations):
                self._step()
        finally:
            self._close(generations)
        outputs = [generation.output() for generation in generations]
        errors = [generation.error for generation in generations]
        if errors and errors[0] is not None and all(errors):
            raise errors[0]
        return [with_token_texts(output, self.tokenizer) for output in outputs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[StreamPiece]:
        """Yield each token of a prompt's samples as it is committed; closing the iterator aborts.

        Several streams may be open at once: whichever is asked next moves all of them on. Prompts of different salts
        share no cache, and drafts are looked up in texts of the same salt alone.
        """
        request_id = f"request-{next(self._ids)}"
        generation = self._start(self._generation(prompt, sampling_params, request_id, cache_salt=cache_salt))
        try:
            while generation.unread or not generation.finished:
                while generation.unread:
                    yield self._readable(generation.piece(generation.unread.popleft()))
                if not generation.finished:
                    self._step()
        finally:
            self._close([generation])
        if generation.error is not None:
            raise generation.error

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several together; one result each, in order.

        The other arguments are those of `generate` and of `render_chat`, and so are the errors.
        """
        prompts = [
            self.render_chat(
                conversation,
                tools,
                add_generation_prompt,
                chat_template_kwargs,
                continue_final_message=continue_final_message,
            )
            for conversation in _as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> Iterator[StreamPiece]:
        """Yield the answer to one conversation as `stream` does; arguments are those of `chat`."""
        prompt = self.render_chat(
            messages, tools, add_generation_prompt, chat_template_kwargs, continue_final_message=continue_final_message
        )
        return self.stream(prompt, sampling_params)

    def _start(self, generation: Generation) -> Generation:
        generation.start(self.engine, self.tokenizer)
        self._generations[generation.request_id] = generation
        return generation

    def _step(self) -> None:
        for output in self.engine.step():
            self._generations[output.request_id].unread.append(output)

    def _close(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            del self._generations[generation.request_id]
            if not generation.finished:
                self.engine.abort(generation.request_id)

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


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt (a text, or token ids) from several."""
    if isinstance(prompts, str | RenderedPrompt):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _as_conversations(messages: Any) -> Sequence[Any]:
    """Tell one conversation, a list of messages, from several."""
    several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
    return messages if several else [messages]
