"""The part that `LLM` and `AsyncEngine` share: it loads models, and makes a `Generation` from a prompt of any form."""

from __future__ import annotations

import inspect
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from speculant.config import EngineConfig, Limits
from speculant.constraints import Constraint
from speculant.engine.build import build_engine
from speculant.engine.fair_steps import FairSteps
from speculant.engine.generation import (
    Generation,
    PlainPrompt,
    Prompt,
    PromptPair,
    RenderedPrompt,
    StreamPiece,
    TokenisedPrompt,
    read_prompt,
    with_token_texts,
)
from speculant.engine.requests import check_client
from speculant.engine.vllm_arguments import absent, read_arguments
from speculant.errors import RequestError
from speculant.models import Checkpoint, read_defaults
from speculant.params import SamplingParams
from speculant.structured import Grammar, Grammars, ReasonedConstraint, Reasoning, banned_tokens
from speculant.text import (
    ExpectedReasoning,
    UserTokenizer,
    check_roles,
    check_variables,
    compile_stops,
    expect_reasoning,
    read_messages,
    read_template,
    up_to_mark,
    with_mark,
)
from speculant.types import NOBODY, Client, Sender

Message = Mapping[str, Any]
_Pieces = TypeVar("_Pieces")  # a stream's type: an iterator, or an asynchronous one
_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes(
    method: Callable[Concatenate[Any, _P], object],
) -> Callable[[Callable[..., _R]], Callable[Concatenate[Any, _P], _R]]:
    """Declare that a method takes the parameters of another one and passes them on."""

    def declared(own: Callable[..., _R]) -> Callable[Concatenate[Any, _P], _R]:
        result = inspect.signature(own).return_annotation
        own.__signature__ = inspect.signature(method).replace(return_annotation=result)  # type: ignore[attr-defined]
        return own

    return declared


class Frontend(ABC, Generic[_Pieces]):
    """A model, its tokenizer, an optional drafter, and an engine that runs them.

    Arguments are the fields of `EngineConfig`; model and draft_model are a folder, a GGUF file, a Hugging Face id or
    "demo". vLLM's other arguments are read too (docs/vllm.md). chat_template: the source of a template, or the path of
    its file, for conversations that bring none; None = the checkpoint's. generation_config: whose sampling settings
    requests without their own have: "auto" = the checkpoint's, "vllm" = the defaults of `SamplingParams`, or a folder
    with generation_config.json. override_generation_config: settings in place of those. Raises SpeculantError with the
    fix for anything that does not fit.
    """

    _steps: FairSteps | None = None  # shared with other engines

    def __init__(
        self,
        model: str,
        draft_model: str | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        generation_config: str | os.PathLike[str] | None = None,
        override_generation_config: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        own = read_arguments(arguments)
        self.config = EngineConfig.from_arguments(model=model, draft_model=draft_model, **own)
        template = read_template(chat_template)
        self._runtime = build_engine(self.config, self._steps)
        tokenizer, recommended = self._runtime.tokenizer, self._runtime.checkpoint.sampling
        self.tokenizer = tokenizer if template is None else tokenizer.with_template(template)
        self._default_params = read_defaults(recommended, generation_config, override_generation_config)
        ends, most_waiting = self._runtime.checkpoint.eos_token_ids, self.limits.max_waiting
        self._grammars = Grammars(self.tokenizer, ends, most_waiting=most_waiting)
        self._banned_tokens = lru_cache(maxsize=8)(banned_tokens)
        self._compile_stops = lru_cache(maxsize=8)(compile_stops)  # many prompts share their stop strings

    @property
    def speculating(self) -> bool:
        """Whether drafts are made."""
        return self._runtime.drafting

    @property
    def speculating_beams(self) -> bool:
        """Whether drafts are made for beam searches too."""
        return self._runtime.drafting_beams

    @property
    def speculation(self) -> str:
        """The drafter and the length of its drafts, or the reason why nothing is drafted."""
        return self._runtime.speculation

    @property
    def checkpoint(self) -> Checkpoint:
        """The target, ready to run, and the metadata of its folder or file."""
        return self._runtime.checkpoint

    @property
    def limits(self) -> Limits:
        """The sizes of the engine: context, sequences that run and wait, rows per pass."""
        return self._runtime.limits

    @property
    def context(self) -> str:
        """How many tokens a sequence may have, and why they are fewer than the model allows, if they are."""
        return self._runtime.context

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory that are planned for weights, keys and values, and the scratch memory of passes."""
        return self._runtime.memory_bytes

    @property
    def prediction_method(self) -> str | None:
        """The method that drafts from a request's prediction alone; None if nothing drafts."""
        return self._runtime.prediction_method

    @property
    def most_draft_tokens(self) -> int:
        """The configured number of draft tokens, or the most that the policy chooses."""
        return self._runtime.most_draft_tokens

    @property
    def kernels(self) -> str:
        """The backend of the target, and why it is not the native kernels if it is another one."""
        return self._runtime.checkpoint.kernels

    @property
    def weight_packing(self) -> str:
        """How the target's weights are stored, and why."""
        return str(self._runtime.checkpoint.packing)

    @property
    def weight_source(self) -> str:
        """The source of the target's packed weights: the cache or the checkpoint. Empty for other kernels."""
        return self._runtime.checkpoint.source

    def get_tokenizer(self) -> UserTokenizer:
        """Return the tokenizer with transformers' names."""
        return UserTokenizer(self.tokenizer, str(self.config.tokenizer or self.config.model))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling settings of requests that have none, for the caller to change."""
        return self.default_params.clone()

    @property
    def default_params(self) -> SamplingParams:
        """The sampling settings of requests that have none: those that the checkpoint recommends, if no others."""
        return self._default_params

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise absent(name, type(self).__name__)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> RenderedPrompt:
        """Return the prompt of a conversation, by a chat template.

        chat_template: its source; None = the one that this was made with, else the checkpoint's. It runs in a sandbox.

        messages are in OpenAI's form, see `read_messages`; tools too. add_generation_prompt: the prompt ends where the
        assistant's answer begins. continue_final_message: it ends within the last message instead, which the answer
        continues. Raises RequestError for messages that the template can't render, ModelError for a
        checkpoint without a template.
        """
        self.check_chats()
        variables = check_variables(chat_template_kwargs)
        given, begins = list(tools) if tools else None, add_generation_prompt and not continue_final_message
        if chat_template is not None and not isinstance(chat_template, str):
            raise RequestError(f"chat_template is a {type(chat_template).__name__}", "give the source of a template.")
        source = chat_template or self.tokenizer.template_for(given is not None)
        conversation, mark = read_messages(messages, source), secrets.token_hex(16)
        shown = with_mark(conversation, mark) if continue_final_message else conversation
        text = self.tokenizer.apply_chat_template(shown, begins, {"tools": given, **variables}, source)
        check_roles(conversation, source or "", text)
        if continue_final_message:
            text = up_to_mark(text, mark, conversation[-1]["content"])
        wanted = begins and variables.get("enable_thinking") is not False and variables.get("thinking") is not False
        quoted = "" if continue_final_message else str(conversation[-1].get("content") or "")
        expected = expect_reasoning(source, text, quoted, wanted)
        return RenderedPrompt(text, reasoning=self._reasoning(expected), expected=expected)

    @abstractmethod
    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = "") -> _Pieces:
        """Yield each token of a prompt's samples as it is committed; closing the iterator aborts."""

    def stream_chat(
        self,
        /,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **named: Any,
    ) -> _Pieces:
        """Yield the answer to a conversation as `stream` does; `named` are its keyword arguments.

        The template is rendered at once, in the caller's thread, with the arguments and errors of `render_chat`.
        """
        prompt = self.render_chat(
            messages,
            tools,
            add_generation_prompt,
            chat_template_kwargs,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
        )
        return self.stream(prompt, sampling_params, **named)

    def check_chats(self) -> None:
        """Raise RequestError if the model has no conversations."""
        if self.has_source:
            raise RequestError(
                "the model is an encoder-decoder, which has no conversations",
                "give the text as the prompt of `generate`, or of a completion.",
            )

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """Return settings whose texts, a prediction and banned words, are token ids. Stop strings are compiled.

        It may be called in any thread, so that a caller's event loop does not do it when the request begins.
        """
        self._compile_stops(tuple(params.stop))
        return self._tokenised(params)

    def _reasoning(self, expected: ExpectedReasoning | None) -> Reasoning | None:
        """Return the tokens of the reasoning that may come before a form; None if there will be none.

        A tag of several tokens can't be distinguished from other tokens; the form then begins at once.
        """
        if expected is None or not expected.possible:
            return None
        start, end = map(self.tokenizer.backend.token_to_id, expected.tags)
        return None if start is None or end is None else Reasoning(start, end, expected.opened)

    def _generation(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str,
        sender: Sender = NOBODY,
        compiled: Future[Grammar] | None = None,
    ) -> Generation:
        """Tokenise a prompt, compile its stop strings and its output's form; raises RequestError if that fails.

        compiled: the form, if the caller has it already; otherwise this call waits for it.
        """
        given, own = self._read_prompt(prompt)
        if own and sender.cache_salt not in ("", own):
            raise RequestError("the prompt and the call have different cache salts", "give one of them.")
        params = self._tokenised((params or self.default_params).clone())  # the caller may change its own later
        stops = self._compile_stops(tuple(params.stop))
        compiling, form = compiled or self._compiling(params, sender.client), params.structured_outputs
        constrain = None
        if compiling is not None and form is not None:
            constrain = _constrain(self._grammars.metered(_awaited(compiling), form, sender.client.name), prompt)
        sender = replace(sender, cache_salt=own or sender.cache_salt)
        return Generation(request_id, self._truncated(given, params), params, sender, stops, constrain)

    @property
    def has_source(self) -> bool:
        """Whether the model is an encoder-decoder: a plain prompt is then the source that its encoder reads."""
        return self.checkpoint.model.needs.source

    def _read_prompt(self, prompt: object) -> tuple[TokenisedPrompt, str]:
        """Return a prompt in any form as token ids, and its cache salt."""
        if isinstance(prompt, RenderedPrompt):
            self.check_chats()
            known = None if prompt.tokens is None else list(prompt.tokens)
            return TokenisedPrompt(prompt.text, self._tokens_of(PlainPrompt(prompt.text, known), special=False)), ""
        read = self.read_prompt(prompt)
        if isinstance(read, PlainPrompt):
            return TokenisedPrompt(read.text, self._tokens_of(read)), read.cache_salt
        text = None if read.decoder is None else read.decoder.text
        source, tokens = self._tokens_of(read.encoder), self.decoder_tokens(read.decoder)
        return TokenisedPrompt(text, tokens, read.encoder.text, source), read.cache_salt

    def read_prompt(self, prompt: object) -> PlainPrompt | PromptPair:
        """Return the content of a prompt: a pair for an encoder-decoder model, whatever the form of the prompt.

        Raises RequestError for a prompt that can't be read, and for a pair if the model has no encoder.
        """
        read = read_prompt(prompt)
        if self.has_source:
            return read if isinstance(read, PromptPair) else PromptPair(read, None, read.cache_salt)
        if isinstance(read, PromptPair):
            raise RequestError(
                "a prompt has an encoder_prompt, and the model has no encoder", "give one text, or its token ids."
            )
        return read

    def decoder_tokens(self, given: PlainPrompt | None) -> list[int]:
        """Return the decoder's prompt of an encoder-decoder model; start tokens that it lacks are put before it."""
        if given is None:
            return list(self._runtime.start_tokens)
        start, own = self.checkpoint.start_tokens, self._tokens_of(given, special=False)
        return own if tuple(own[: len(start)]) == start else [*start, *own]

    def _tokens_of(self, plain: PlainPrompt, special: bool = True) -> list[int]:
        """Return a prompt's token ids; special: the tokenizer adds its special tokens to a text."""
        return self.tokenizer.encode(plain.text or "", special) if plain.tokens is None else plain.tokens

    def guard_forms(self) -> None:
        """Expect hostile forms: limit the time and memory that each may take. Servers of strangers call it."""
        self._grammars.guard()

    def _compiling(self, params: SamplingParams | None, client: Client) -> Future[Grammar] | None:
        """Start to compile the form of these settings; None if they have none."""
        check_client(client)
        form = (params or self.default_params).structured_outputs
        return None if form is None else self._grammars.compile(form, client.name)

    def _tokenised(self, params: SamplingParams) -> SamplingParams:
        """Return settings whose texts, a prediction and banned words, are token ids."""
        if isinstance(params.prediction, str):
            params = params.with_prediction(self.tokenizer.encode(params.prediction, add_special_tokens=False))
        if any(isinstance(word, str) for word in params.bad_words):
            params = replace(params, bad_words=self._banned_tokens(tuple(params.bad_words), self.tokenizer.encode))
        return params

    def _truncated(self, given: TokenisedPrompt, params: SamplingParams) -> TokenisedPrompt:
        """Return a prompt of which `truncate_prompt_tokens` keeps the end: of its source, if the model reads one."""
        most = params.truncate_prompt_tokens
        if most is None:
            return given
        if self.has_source:
            return replace(given, source=given.source[-(self.limits.max_source_len if most == -1 else most) :])
        if most == -1:
            most = max(1, self.limits.max_model_len - (params.max_tokens or 1))
        return replace(given, tokens=given.tokens[-most:])

    def _readable(self, piece: StreamPiece) -> StreamPiece:
        """Return a piece for the caller: tokens of log-probabilities get their texts."""
        return piece if piece.output is None else replace(piece, output=with_token_texts(piece.output, self.tokenizer))


def _awaited(compiling: Future[Grammar]) -> Grammar:
    """Wait for a form; a caller who is interrupted no longer waits for it."""
    try:
        return compiling.result()
    finally:
        compiling.cancel()


def _constrain(grammar: Grammar, prompt: Prompt) -> Callable[[], Constraint]:
    """Return a function that makes the constraint of an answer: the form, after reasoning if there may be some."""
    if isinstance(prompt, RenderedPrompt) and prompt.reasoning is not None:
        return partial(ReasonedConstraint, grammar, prompt.reasoning)
    return grammar.constrain
