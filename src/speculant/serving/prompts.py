"""From texts and conversations to token ids, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from speculant.engine.async_engine import AsyncEngine
from speculant.engine.frontend import RenderedPrompt
from speculant.params import SamplingParams
from speculant.serving.errors import refusal, timed_out
from speculant.serving.options import ServerOptions
from speculant.serving.protocol import ChatBody, CompletionBody, TokenizeBody
from speculant.serving.state import ServerState

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that they were made from if there is one. rendered: it is a conversation."""

    tokens: Sequence[int]
    text: str | None = None
    rendered: RenderedPrompt | None = None

    @property
    def given(self) -> Sequence[int] | RenderedPrompt:
        """What an engine gets."""
        return self.tokens if self.rendered is None else self.rendered


@dataclass(frozen=True)
class Prompts:
    """Makes prompts in the server's threads for text, within `options.text_timeout` seconds each."""

    state: ServerState
    options: ServerOptions

    async def aside(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; it runs in a thread. Raises ApiError (504) if that takes too long."""
        working = asyncio.get_running_loop().run_in_executor(self.state.texts, work)
        try:
            async with asyncio.timeout(self.options.text_timeout):
                return await working
        except TimeoutError:
            raise timed_out("Reading the prompt took too long.") from None

    async def of_completion(self, engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
        """Return the prompts of a completion; see `count_prompts`."""
        return await self.aside(lambda: [self._of(engine, each) for each in _listed(body)])

    async def of_text(self, engine: AsyncEngine, text: str, add_special_tokens: bool) -> Prompt:
        """Return the prompt of a text."""
        self._check_text(text)
        return await self.aside(lambda: Prompt(engine.tokenizer.encode(text, add_special_tokens), text))

    async def of_chat(self, engine: AsyncEngine, body: ChatBody | TokenizeBody) -> Prompt:
        """Return the prompt of a conversation, by the template of the model's folder.

        Raises ApiError (400) or SpeculantError for messages that it can't render; RequestError if there is no template.
        """
        messages = body.messages or []
        if len(messages) > self.options.max_messages:
            raise refusal(f"There are {len(messages)} messages and {self.options.max_messages} may be.", "messages")
        variables = dict(body.chat_template_kwargs or {})
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        tools = None if isinstance(body, ChatBody) and body.tool_choice == "none" else body.tools
        conversation = [message.model_dump(exclude_none=True) for message in messages]

        def render() -> Prompt:
            begins, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
            rendered = engine.render_chat(conversation, tools, begins, variables, continue_final_message=continues)
            self._check_text(rendered.text)
            tokens = engine.tokenizer.encode(rendered.text, add_special_tokens=False)
            return Prompt(tokens, rendered.text, replace(rendered, tokens=tokens))

        return await self.aside(render)

    async def of_params(self, engine: AsyncEngine, params: SamplingParams) -> SamplingParams:
        """Return settings whose prediction, if there is one, is token ids."""
        guess = params.prediction
        if not isinstance(guess, str):
            return params
        tokens = await self.aside(lambda: engine.tokenizer.encode(guess, add_special_tokens=False))
        return params.with_prediction(tokens)

    def _of(self, engine: AsyncEngine, prompt: str | Sequence[int]) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(prompt)
        self._check_text(prompt)
        return Prompt(engine.tokenizer.encode(prompt), prompt)

    def _check_text(self, text: str) -> None:
        most = self.options.max_prompt_characters
        if len(text) > most:
            raise refusal(f"The prompt has {len(text)} characters and {most} are the most.", "prompt", "too_long")


def count_prompts(body: CompletionBody, options: ServerOptions) -> int:
    """Return how many prompts a completion has. Raises ApiError (400) if there are too many."""
    prompts = _listed(body)
    if len(prompts) > options.max_prompts:
        raise refusal(f"There are {len(prompts)} prompts and {options.max_prompts} are the most.", "prompt")
    return len(prompts)


def _listed(body: CompletionBody) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt
