"""What every way into an engine begins with: loaded models, and a prompt that becomes a `Generation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from speculant.config import EngineConfig, Limits
from speculant.engine.build import build_engine
from speculant.engine.generation import Generation, StreamPiece, with_token_texts
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.structured.constraint import Grammar
from speculant.structured.grammars import Grammars
from speculant.text.messages import check_variables, read_messages
from speculant.text.stop import compile_stops


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a conversation in the model's format. It has its special tokens; none are added."""

    text: str


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
    def default_params(self) -> SamplingParams:
        """The sampling settings that the checkpoint recommends."""
        return self._runtime.checkpoint.sampling

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Return the prompt of a conversation, by the checkpoint's chat template.

        messages are in OpenAI's form, see `read_messages`; tools too. add_generation_prompt: the prompt ends where the
        assistant's answer begins. Raises RequestError for messages that the template can't render, ModelError for a
        checkpoint without a template.
        """
        variables, conversation = check_variables(chat_template_kwargs), read_messages(messages)
        given = list(tools) if tools else None
        return RenderedPrompt(
            self.tokenizer.apply_chat_template(conversation, add_generation_prompt, tools=given, **variables)
        )

    def _generation(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, priority: int = 0, cache_salt: str = ""
    ) -> Generation:
        """Tokenise a prompt, compile its stop strings and its output's form; raises RequestError if that fails."""
        text, tokens = self._read_prompt(prompt)
        params = self._tokenised(params or self.default_params)
        stops, compiling = self._compile_stops(tuple(params.stop)), self._compiling(params)
        constrain = compiling.result().constrain if compiling else None
        return Generation(request_id, text, tokens, params, priority, cache_salt, stops, constrain)

    def _read_prompt(self, prompt: object) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, RenderedPrompt):
            return prompt.text, self.tokenizer.encode(prompt.text, add_special_tokens=False)
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
