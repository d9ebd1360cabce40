"""`LLM`: prompts in, text out, in one process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from speculant.engine.beam_search import BeamSearchOutput, BeamSearchParams
from speculant.engine.frontend import Frontend, Message, Prompt
from speculant.engine.generation import Generation, StreamPiece, with_token_texts
from speculant.engine.progress import ShowProgress, progress
from speculant.engine.prompts import split_prompts
from speculant.engine.readings import Metric, read_metrics
from speculant.engine.shared import SharedEngine
from speculant.engine.vllm_arguments import check_call
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.types import RequestOutput


class LLM(Frontend):
    """Runs prompts to their end, or streams them, in the caller's own thread.

    Arguments are the fields of `EngineConfig`, see `Frontend`. Several threads may use one `LLM`: their prompts run in
    one batch, the threads take turns at its steps, and each gets its own results.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        super().__init__(model, draft_model, **arguments)
        self.engine = self._runtime.engine
        self._ids = itertools.count()
        self._shared = SharedEngine(self.engine, self.tokenizer)

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

        use_tqdm: see `progress`. priority: one number per prompt; a lower one is served sooner. The rest is vLLM's, and
        has to be None.
        """
        check_call(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        listed = split_prompts(prompts)
        each = zip(listed, self._params_for(listed, sampling_params), _priorities(listed, priority), strict=True)
        made = deque(
            self._generation(prompt, params, f"request-{next(self._ids)}", rank) for prompt, params, rank in each
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

        use_tqdm and lora_request: see `generate`. concurrency_limit has no effect: max_num_seqs says how many run.
        """
        results = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request)
        return [BeamSearchOutput.of(result, params, self.tokenizer) for result in results]

    def get_metrics(self) -> list[Metric]:
        """Return the engine's totals under vLLM's names and under its own."""
        return read_metrics(self.engine.metrics, str(self.config.model))

    def reset_prefix_cache(self) -> bool:
        """Forget all prompts that are kept for later ones; return whether none is left, as open streams hold theirs."""
        return self.engine.reset_prefix_cache()

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[StreamPiece]:
        """Yield each token of a prompt's samples as it is committed; closing the iterator aborts.

        Several streams may be open at once, in several threads too: whichever is asked next moves all of them on.
        Prompts of different salts share no cache, and drafts are looked up in texts of the same salt alone.
        """
        request_id = f"request-{next(self._ids)}"
        generation = self._generation(prompt, sampling_params, request_id, cache_salt=cache_salt)
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

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> Iterator[StreamPiece]:
        """Yield the answer to one conversation as `stream` does; the other arguments are those of `render_chat`."""
        prompt = self.render_chat(
            messages,
            tools,
            add_generation_prompt,
            chat_template_kwargs,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
        )
        return self.stream(prompt, sampling_params)

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
    """Tell one conversation, a list of messages, from several."""
    several = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
    return messages if several else [messages]
