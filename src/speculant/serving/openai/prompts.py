"""Turns texts and conversations into token ids, outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from speculant.engine import AsyncEngine, PlainPrompt, Prompt as GivenPrompt, PromptPair, RenderedPrompt
from speculant.params import SamplingParams
from speculant.serving.errors import refusal, timed_out
from speculant.serving.openai.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    ConversationBody,
    Message,
    TokenizeBody,
)
from speculant.serving.options import ServerOptions
from speculant.serving.state import TextLanes
from speculant.text import TokenOffsets

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and their text if they were made from one. rendered: set for a conversation.

    source: what the encoder of an encoder-decoder model reads; the prompt is its decoder's. offsets: where the text of
    each token begins, if the answer repeats the prompt with its log-probabilities.
    """

    tokens: Sequence[int]
    text: str | None = None
    rendered: RenderedPrompt | None = None
    offsets: Sequence[int] = ()
    source: Sequence[int] | None = None

    @property
    def given(self) -> GivenPrompt:
        """The prompt in the form for an engine."""
        if self.source is not None:
            return {"encoder_prompt": self.source, "decoder_prompt": self.tokens}
        return self.tokens if self.rendered is None else self.rendered

    @property
    def num_tokens(self) -> int:
        """The number of tokens, those of the source included."""
        return len(self.source or ()) + len(self.tokens)


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of one request in a text thread. Each piece of work has `options.text_timeout` seconds.

    client: the sender, who takes turns with others. size: bytes of the body.
    """

    lanes: TextLanes
    options: ServerOptions
    client: str
    size: int

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in a thread.

        Raises ApiError if it takes too long (504), or if the client has too much work in the lane (429).
        """
        working = asyncio.wrap_future(self.lanes.submit(self.client, self.size, work))
        try:
            async with asyncio.timeout(self.options.text_timeout):
                return await working
        except TimeoutError:
            raise timed_out("Reading the prompt took too long.") from None

    async def of_completion(self, engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
        """Return the prompts of a completion; see `count_prompts`."""
        return await self.in_thread(lambda: self._completed(engine, body))

    async def of_text(self, engine: AsyncEngine, text: str, body: TokenizeBody) -> Prompt:
        """Return the prompt of a text, which may be longer than the context."""
        self._check_text(text)
        return await self.in_thread(lambda: _of(engine, PlainPrompt(text), body))

    async def of_chat(self, engine: AsyncEngine, body: ConversationBody) -> Prompt:
        """Return the prompt of a conversation, by the template of the model's folder.

        Raises ApiError (400) or SpeculantError for messages that it can't render, RequestError without a template.
        """
        messages = body.messages or []
        if body.truncation_side == "right" and body.truncate_prompt_tokens is not None:
            raise refusal(
                "A conversation can only be cut on the left, as the answer follows its end.", "truncation_side"
            )
        if len(messages) > self.options.max_messages:
            raise refusal(
                f"There are {len(messages)} messages and at most {self.options.max_messages} are allowed.", "messages"
            )
        return await self.in_thread(lambda: self._rendered(engine, messages, body))

    def _completed(self, engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
        read = [engine.read_prompt(each) for each in _listed(body)]
        for prompt in read:
            self._check(engine, prompt, body)
        return [_of(engine, each, body) for each in read]

    def _check(self, engine: AsyncEngine, prompt: PlainPrompt | PromptPair, body: CompletionBody) -> None:
        """Raise ApiError (400) for a salt within a prompt, and for texts that are too long."""
        parts = [prompt] if isinstance(prompt, PlainPrompt) else [prompt.encoder, prompt.decoder or PlainPrompt()]
        if prompt.cache_salt or parts[-1].cache_salt:
            raise refusal("A prompt has a cache_salt: send it beside the prompt.", "prompt")
        texts = [text for part in parts if (text := _text(part)) is not None]
        self._check_text("".join(texts))
        for text in texts:
            _check_fits(engine, text, body)

    def _rendered(self, engine: AsyncEngine, messages: Sequence[Message], body: ConversationBody) -> Prompt:
        variables = dict(body.chat_template_kwargs or {})
        for name in ("reasoning_effort", "documents"):
            if (value := getattr(body, name)) is not None:
                variables.setdefault(name, value)
        if body.reasoning_effort is not None:  # for templates with a switch in place of an effort
            variables.setdefault("enable_thinking", body.reasoning_effort != "none")
        tools = None if body.tool_choice == "none" else body.tools
        conversation = [message.model_dump(exclude_none=True) for message in messages]
        begins, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
        rendered = engine.render_chat(conversation, tools, begins, variables, continue_final_message=continues)
        self._check_text(rendered.text)
        _check_fits(engine, rendered.text, body)
        tokens = _cut(engine, engine.tokenizer.encode(rendered.text, bool(body.add_special_tokens)), body)
        return Prompt(tokens, rendered.text, replace(rendered, tokens=tokens))

    async def of_params(self, engine: AsyncEngine, params: SamplingParams) -> SamplingParams:
        """Return the settings for an engine, see `prepare` there."""
        texts = params.prediction or params.bad_words or params.stop
        return await self.in_thread(lambda: engine.prepare(params)) if texts else params

    def _check_text(self, text: str) -> None:
        most = self.options.max_prompt_characters
        if len(text) > most:
            raise refusal(
                f"The prompt has {len(text)} characters and at most {most} are allowed.", "prompt", "too_long"
            )


def _of(engine: AsyncEngine, given: PlainPrompt | PromptPair, body: CompletionBody | TokenizeBody) -> Prompt:
    """Return a prompt, cut as the request asks; for a pair it is the decoder's, and the source is cut."""
    if isinstance(given, PlainPrompt):
        return _echoed(engine, Prompt(_cut(engine, _tokens(engine, given, body), body), _text(given)), body)
    source = _cut(engine, _tokens(engine, given.encoder, body), body)
    text = None if given.decoder is None else _text(given.decoder)
    return _echoed(engine, Prompt(engine.decoder_tokens(given.decoder), text, source=source), body)


def _text(given: PlainPrompt) -> str | None:
    """Return the text of a prompt; None if it has token ids, which take precedence."""
    return given.text if given.tokens is None else None


def _tokens(engine: AsyncEngine, given: PlainPrompt, body: CompletionBody | TokenizeBody) -> Sequence[int]:
    if given.tokens is not None:
        return given.tokens
    return engine.tokenizer.encode(given.text or "", body.add_special_tokens is not False)


def _check_fits(engine: AsyncEngine, text: str, body: CompletionBody | ConversationBody) -> None:
    """Raise ApiError (400) for a text that is certain to have more tokens than the context, before it is tokenised.

    A text that is cut may be longer, and so may one of /tokenize, which generates nothing.
    """
    most, longest = engine.tokenizer.characters_per_token, engine.limits.max_model_len
    if most is None or body.truncate_prompt_tokens is not None or isinstance(body, TokenizeBody):
        return
    if len(text) > most * longest:
        raise refusal(
            f"The prompt has {len(text)} characters, which are over {longest} tokens, and the context has {longest}.",
            "prompt",
            "too_long",
        )


def _echoed(engine: AsyncEngine, prompt: Prompt, body: CompletionBody | TokenizeBody) -> Prompt:
    """Return a prompt with its text and the offsets of its tokens, if an answer repeats it."""
    if not (isinstance(body, CompletionBody) and body.echo):
        return prompt
    if len(prompt.tokens) > engine.limits.max_model_len:
        return prompt  # which the engine refuses
    tokenizer = engine.tokenizer
    skip = body.skip_special_tokens is not False
    whole = prompt.text is not None and body.truncate_prompt_tokens is None
    text = prompt.text if whole else tokenizer.decode(prompt.tokens, skip)
    if body.logprobs is None:
        return replace(prompt, text=text)
    places = TokenOffsets(tokenizer, skip)
    return replace(prompt, text=text, offsets=[places.next(token) for token in prompt.tokens])


def _cut(engine: AsyncEngine, tokens: Sequence[int], body: CompletionBody | ConversationBody) -> Sequence[int]:
    """Return the tokens of a prompt that a request keeps: the last ones, unless it names the other side."""
    most = body.truncate_prompt_tokens
    if most is None:
        return tokens
    if most == -1:  # as many as fit into the context with the answer, or into the encoder
        room = engine.limits.max_model_len - _answer_tokens(body)
        most = engine.limits.max_source_len if engine.has_source else max(1, room)
    if most < 1:
        raise refusal(
            f"truncate_prompt_tokens={most} is neither a number of tokens above 0 nor -1.", "truncate_prompt_tokens"
        )
    return tokens[:most] if body.truncation_side == "right" else tokens[-most:]


def _answer_tokens(body: CompletionBody | ConversationBody) -> int:
    """Return the tokens to reserve for an answer: its limit, otherwise one."""
    if isinstance(body, CompletionBody):
        return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return (body.max_completion_tokens or body.max_tokens or 1) if isinstance(body, ChatBody) else 1


def count_prompts(body: CompletionBody, options: ServerOptions) -> int:
    """Return how many prompts a completion has. Raises ApiError (400) if there are too many."""
    prompts = _listed(body)
    if len(prompts) > options.max_prompts:
        raise refusal(f"There are {len(prompts)} prompts and at most {options.max_prompts} are allowed.", "prompt")
    return len(prompts)


def _listed(body: CompletionBody) -> Sequence[str | Sequence[int] | Mapping[str, Any]]:
    prompt = body.prompt
    if isinstance(prompt, str | dict):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt
