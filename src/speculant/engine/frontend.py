"""What every way into an engine begins with: loaded models, and a prompt that becomes a `Generation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from speculant.config import EngineConfig, Limits
from speculant.constraints import Constraint
from speculant.engine.build import build_engine
from speculant.engine.generation import Generation, StreamPiece, with_token_texts
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.structured.constraint import Grammar
from speculant.structured.grammars import Grammars
from speculant.structured.reasoned import ReasonedConstraint, Reasoning
from speculant.text.messages import check_variables, read_messages
from speculant.text.reasoning import ExpectedReasoning, expect_reasoning
from speculant.text.stop import compile_stops


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a conversation in the model's format. It has its special tokens; none are added.

    tokens: its token ids, if they are known already. reasoning: the tokens around the reasoning that may come before
    an answer of a given form; None = the form begins at once. expected: the reasoning that other answers may have.
    """

    text: str
    tokens: Sequence[int] | None = None
    reasoning: Reasoning | None = None
    expected: ExpectedReasoning | None = None


Prompt = str | RenderedPrompt | Sequence[int]
Message = Mapping[str, Any]


class Frontend:
    """A model, its tokenizer, an optional drafter, and an engine that runs them.

    Arguments are the fields of `EngineConfig`; model and draft_model are a folder, a Hugging Face id
    or "demo". Raises SpeculantError with the fix for anything that does not fit.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        self.config = EngineConfig.from_arguments(model=model, draft_model=draft_model, **arguments)
        self._runtime = build_engine(self.config)
        self.tokenizer = self._runtime.tokenizer
        self._grammars = Grammars(self.tokenizer, self._runtime.checkpoint.eos_token_ids)
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
        """What drafts, and how long; or why nothing does."""
        return self._runtime.speculation

    @property
    def limits(self) -> Limits:
        """The sizes of the engine: context, sequences that run and wait, rows per pass."""
        return self._runtime.limits

    @property
    def prediction_method(self) -> str | None:
        """The method that drafts from a request's prediction alone; None if nothing drafts."""
        return self._runtime.prediction_method

    @property
    def kernels(self) -> str:
        """What computes the target, and why it is not the native kernels if it is not."""
        return self._runtime.checkpoint.kernels

    @property
    def weight_packing(self) -> str:
        """How the target's weights are stored, and why."""
        return str(self._runtime.checkpoint.packing)

    @property
    def weight_source(self) -> str:
        """Where the target's packed weights are from: the cache, or the checkpoint. Empty for other kernels."""
        return self._runtime.checkpoint.source

    @property
    def default_params(self) -> SamplingParams:
        """The sampling settings that the checkpoint recommends."""
        return self._runtime.checkpoint.sampling

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Return the prompt of a conversation, by the checkpoint's chat template.

        messages are in OpenAI's form, see `read_messages`; tools too. add_generation_prompt: the prompt ends where the
        assistant's answer begins. continue_final_message: it ends within the last message instead, which the answer
        continues. Raises RequestError for messages that the template can't render, ModelError for a
        checkpoint without a template.
        """
        variables, conversation = check_variables(chat_template_kwargs), read_messages(messages)
        given, begins = list(tools) if tools else None, add_generation_prompt and not continue_final_message
        text = self.tokenizer.apply_chat_template(conversation, begins, tools=given, **variables)
        if continue_final_message:
            text = _up_to_content(text, conversation[-1])
        wanted = begins and variables.get("enable_thinking") is not False and variables.get("thinking") is not False
        quoted = "" if continue_final_message else str(conversation[-1].get("content") or "")
        expected = expect_reasoning(self.tokenizer.template_for(given is not None), text, quoted, wanted)
        return RenderedPrompt(text, reasoning=self._reasoning(expected), expected=expected)

    def _reasoning(self, expected: ExpectedReasoning | None) -> Reasoning | None:
        """Return the tokens of the reasoning that may come before a form; None if there will be none.

        Tags that are several tokens each can't be told from other tokens: the form begins at once.
        """
        if expected is None or not expected.possible:
            return None
        start, end = map(self.tokenizer.backend.token_to_id, expected.tags)
        return None if start is None or end is None else Reasoning(start, end, expected.opened)

    def _generation(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, priority: int = 0, cache_salt: str = ""
    ) -> Generation:
        """Tokenise a prompt, compile its stop strings and its output's form; raises RequestError if that fails."""
        text, tokens = self._read_prompt(prompt)
        params = self._tokenised(params or self.default_params)
        stops, compiling = self._compile_stops(tuple(params.stop)), self._compiling(params)
        constrain = None if compiling is None else _constrain(compiling.result(), prompt)
        return Generation(request_id, text, tokens, params, priority, cache_salt, stops, constrain)

    def _read_prompt(self, prompt: object) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, RenderedPrompt):
            known = prompt.tokens
            tokens = self.tokenizer.encode(prompt.text, add_special_tokens=False) if known is None else list(known)
            return prompt.text, tokens
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(
                f"a prompt is a {type(prompt).__name__}", "give a text, a list of token ids, or a list of those."
            )
        return None, list(prompt)

    def _compiling(self, params: SamplingParams | None) -> Future[Grammar] | None:
        """Have the form compiled that these settings ask for; None if they ask for none."""
        form = (params or self.default_params).structured_outputs
        return None if form is None else self._grammars.compile(form)

    def _tokenised(self, params: SamplingParams) -> SamplingParams:
        """Return settings whose prediction, if there is one, is token ids."""
        text = params.prediction
        if not isinstance(text, str):
            return params
        return params.with_prediction(self.tokenizer.encode(text, add_special_tokens=False))

    def _readable(self, piece: StreamPiece) -> StreamPiece:
        """Return a piece for the caller: tokens of log-probabilities get their texts."""
        return piece if piece.output is None else replace(piece, output=with_token_texts(piece.output, self.tokenizer))


def _constrain(grammar: Grammar, prompt: Prompt) -> Callable[[], Constraint]:
    """Return what makes the constraint of an answer: the form, behind the reasoning if there may be one."""
    if isinstance(prompt, RenderedPrompt) and prompt.reasoning is not None:
        return partial(ReasonedConstraint, grammar, prompt.reasoning)
    return grammar.constrain


def _up_to_content(text: str, message: Message) -> str:
    """Return a rendered conversation up to the end of its last message's content, without what closes the message."""
    content = str(message["content"]).rstrip()
    place = text.rfind(content)
    if not content or place < 0:
        raise RequestError(
            "the last message can't be continued: its content is empty, or the chat template changes it",
            "leave out continue_final_message.",
        )
    return text[: place + len(content)]
